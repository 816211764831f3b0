"""A plain enumeration of stock Megatron's settings, beside the search (`tools/enumerate_stock.py`).

Every order of the kinds of GPUs (all nodes of some of them, one kind after the other), every
tensor-, context-, pipeline- and data-parallel size, both orders of ranks, every expert-parallel and
expert-tensor-parallel size, both dispatchers, every micro-batch size, no recompute or all, or as
few layers by blocks as fit, one to four model chunks; layers as even as can be and in proportion to
the speed of stages, and of what comes within half of the best price with that, every move of one
layer from or to an end.  Nothing of `planner.stock` is used: plans are written as layouts and
priced by the cost model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, permutations

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.widths import usable_widths
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import first_violations
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import LayerRange, Plan, Replica, Stage, StageShape
from megatron_hetero.plan.stock_ranks import hosts_in_rank_order
from megatron_hetero.schedule.of_plan import with_schedule
from megatron_hetero.schedule.orders.interleaved import interleaved

_NEAR = 1.5
"""A move of one layer does not make a plan better by as much."""


def divisors(number: int) -> list[int]:
    """Return all divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def orders(cluster: Cluster) -> Iterator[list[Node]]:
    """Yield the nodes of each selection of kinds, one kind after the other, in every order."""
    nodes = sorted(cluster.nodes, key=lambda node: (node.gpu_type.name, node.name))
    kinds = [list(group) for _, group in groupby(nodes, key=lambda node: node.gpu_type.name)]
    for size in range(1, len(kinds) + 1):
        for chosen in permutations(kinds, size):
            yield [node for kind in chosen for node in kind]


def experts(workload: Workload, width: int, context: int, replicas: int) -> Iterator[str]:
    """Yield the part of a stage's layout that says how experts are dealt out."""
    yield ""
    model, own = workload.model, width * context
    for size in divisors(model.num_experts) if model.num_experts else ():
        for etp in divisors(width):
            whole = size * etp
            fits = own * replicas % whole == 0 and (own % whole == 0 or whole % own == 0)
            if fits and (size, etp) != (1, width) and model.moe_ffn_hidden_size % etp == 0:
                yield f"ep{size}etp{etp}"


def plans(cluster: Cluster, workload: Workload) -> Iterator[tuple[float, Plan]]:
    """Yield plans that fit, with the cost model's price."""
    model, batch = workload.model, workload.training.global_batch_size
    least_s = float("inf")
    jobs: dict[tuple[object, ...], tuple[Workload, CostModel]] = {}

    def of(size: int, recompute: str, dispatcher: str) -> tuple[Workload, CostModel]:
        key = size, recompute, dispatcher
        if key not in jobs:
            training = replace(
                workload.training,
                micro_batch_size=size,
                recompute=recompute,  # type: ignore[arg-type]
                token_dispatcher=dispatcher,  # type: ignore[arg-type]
            )
            changed = replace(workload, training=training)
            jobs[key] = changed, CostModel(cluster, changed)
        return jobs[key]

    for nodes in orders(cluster):
        names = [device.name for node in nodes for device in node.devices]
        speeds = {d.name: node.gpu_type for node in nodes for d in node.devices}
        widths = set.intersection(*(set(usable_widths(cluster, workload, n)) for n in nodes))
        for width in sorted(widths):
            for context in divisors(len(names) // width):
                if model.seq_length % (2 * context * width) or len(names) % (width * context):
                    continue
                own = width * context
                for replicas in divisors(len(names) // own):
                    depth = len(names) // own // replicas
                    if depth > model.num_layers or batch % replicas:
                        continue
                    for order in ("tp-dp-pp", "tp-pp-dp"):
                        at = {
                            (d, p): names[place * own : (place + 1) * own]
                            for d in range(replicas)
                            for p in range(depth)
                            for place in (
                                (d + replicas * p,) if order == "tp-dp-pp" else (p + depth * d,)
                            )
                        }
                        rates = [
                            min(
                                speeds[name].peak_flops["bf16"] or 1.0
                                for d in range(replicas)
                                for name in at[d, p]
                            )
                            for p in range(depth)
                        ]
                        starts, moved = divisions(model.num_layers, rates)
                        given = cluster, of, at, (replicas, depth, order)
                        for dealt in experts(workload, width, context, replicas):
                            form = f"tp{width}{f'cp{context}' if context > 1 else ''}{dealt}"
                            found = [e for n in starts for e in priced(*given, form, n, batch)]
                            own_s = min((price_s for price_s, _ in found), default=float("inf"))
                            least_s = min(least_s, own_s)
                            yield from found
                            # What is far behind is not divided in further ways.
                            if own_s <= _NEAR * least_s or not found:
                                for layers in moved:
                                    yield from priced(*given, form, layers, batch)
                        if depth == 1 or replicas == 1:
                            break


def divisions(
    num_layers: int, rates: Sequence[float]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return layers as even as can be and in proportion to rates; and these with moves of one layer
    from or to the last and the first stage."""
    depth = len(rates)
    even = tuple(num_layers // depth + (p < num_layers % depth) for p in range(depth))
    ideal = [num_layers * rate / sum(rates) for rate in rates]
    own = [max(1, int(n)) for n in ideal]
    while sum(own) < num_layers:
        own[max(range(depth), key=lambda p: ideal[p] - own[p])] += 1
    while sum(own) > num_layers:
        own[max(range(depth), key=lambda p: own[p] - ideal[p])] -= 1
    starts = {even, tuple(own)}
    found = set()
    for start in starts:
        for giver in range(depth):
            for taker in range(depth):
                if giver != taker and start[giver] > 1 and {giver, taker} & {0, depth - 1}:
                    moved = list(start)
                    moved[giver] -= 1
                    moved[taker] += 1
                    found.add(tuple(moved))
    return sorted(starts), sorted(found - starts)


def priced(cluster, of, at, shape, form, layers, batch) -> Iterator[tuple[float, Plan]]:  # type: ignore[no-untyped-def]
    """Yield one form on one grid under all of its settings."""
    replicas, depth, order = shape
    for size in divisors(batch // replicas):
        number = batch // replicas // size
        line = ",".join(f"{form}:{n}" for n in layers)
        shapes = parse_layout(f"{line} @{number}").replicas[0].stages
        first = [sum(layers[:p]) for p in range(depth)]

        def plan_of(
            recompute: str,
            dispatcher: str,
            blocks: int = 0,
            size: int = size,
            number: int = number,
            shapes: Sequence[StageShape] = shapes,
            first: Sequence[int] = first,
        ) -> tuple[CostModel, Plan]:
            """Write a plan that recomputes so many layers of each stage by blocks."""
            workload, costs = of(size, recompute, dispatcher)
            made = tuple(
                Replica(
                    tuple(
                        Stage(
                            shapes[p],
                            first[p],
                            tuple(at[d, p]),
                            recompute="full" if blocks else None,
                            recompute_num_layers=min(blocks, layers[p]) if blocks else None,
                        )
                        for p in range(depth)
                    ),
                    number,
                )
                for d in range(replicas)
            )
            hosts = hosts_in_rank_order(made, order, cluster)
            return costs, Plan(made, workload=workload, hosts=hosts)

        def fitting(costs: CostModel, plan: Plan) -> tuple[float, Plan] | None:
            """Return the plan with its price where it fits."""
            cost = costs.placement(placement_of(plan, cluster))
            return (cost.step_time_s, plan) if cost.missing_bytes <= 0 else None

        for dispatcher in ("allgather", "alltoall") if "ep" in form else ("allgather",):
            plain = plan_of("none", dispatcher)
            if first_violations(plain[1]):
                break
            # Without recompute, and with all of it, which interleaved stages may have too.
            found = [fitting(*plain), fitting(*plan_of("full", dispatcher))]
            yield from (entry for entry in found if entry is not None)
            # The fewest layers by blocks, as each layer more takes longer and keeps less.
            if found[0] is None and found[1] is not None and max(layers) > 1:
                low, high = 0, max(layers)
                while high - low > 1:
                    middle = (low + high) // 2
                    entry = fitting(*plan_of("none", dispatcher, middle))
                    low, high = (low, middle) if entry is not None else (middle, high)
                if high < max(layers):
                    entry = fitting(*plan_of("none", dispatcher, high))
                    assert entry is not None
                    yield entry


def chunked(plan: Plan) -> Iterator[Plan]:
    """Yield a plan, and with its stages in two to four chunks as even as can be."""
    yield plan
    stages, number = plan.replicas[0].stages, plan.replicas[0].num_micro_batches
    depth = len(stages)
    # Interleaved stages recompute all layers or none.
    if any(stage.recompute_num_layers for stage in stages):
        return
    for chunks in range(2, 5):
        if depth == 1 or number % depth or min(s.shape.num_layers for s in stages) < chunks:
            continue
        sizes = [
            stage.shape.num_layers // chunks + (c < stage.shape.num_layers % chunks)
            for c in range(chunks)
            for stage in stages
        ]
        ranges = [LayerRange(sum(sizes[:i]), n) for i, n in enumerate(sizes)]
        made = tuple(
            replace(
                replica,
                stages=tuple(
                    replace(
                        stage, first_layer=ranges[p].first_layer, chunks=tuple(ranges[p::depth])
                    )
                    for p, stage in enumerate(replica.stages)
                ),
            )
            for replica in plan.replicas
        )
        schedule = interleaved(tuple(range(depth)) * chunks, number)
        whole = replace(plan, replicas=made)
        for r in range(len(made)):
            whole = with_schedule(whole, r, schedule, "interleaved")
        yield whole
