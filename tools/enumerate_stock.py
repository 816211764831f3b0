"""Beside the search of stock Megatron's best plan: plain enumeration of its settings.

    python tools/enumerate_stock.py [--only JOB ...]

Every order of the kinds of GPUs (all nodes of some of them, one kind after the other), every
tensor-, context-, pipeline- and data-parallel size, both orders of ranks, every expert-parallel and
expert-tensor-parallel size, both dispatchers, every micro-batch size, no recompute or all, or as
few layers by blocks as fit, one to four model chunks; layers as even as can be and in proportion to
the speed of stages, and of what comes within half of the best price with that, every move of one
layer from or to an end.  Nothing of `planner.stock` is used: plans are written as layouts, priced
by the cost model, and the best of them simulated.  Prints a row for each of twelve jobs, with both
steps and their ratio; fails where the enumeration is faster by more than the search's tolerance.

Then a row for each of four jobs whose row of stock Megatron was once false, as the command `plan`
says it: its own plan, the best of stock Megatron beside it, and what people do by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, permutations
from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster, Node
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.widths import usable_widths
from megatron_hetero.errors import HeteroError
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import first_violations
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import LayerRange, Plan, Replica, Stage, StageShape
from megatron_hetero.plan.stock_ranks import hosts_in_rank_order
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.stock.limits import limits_beside_a_plan
from megatron_hetero.planner.stock.search import best_stock_plan
from megatron_hetero.schedule.of_plan import with_schedule
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import is_stock

ROOT = Path(__file__).resolve().parents[1]
NUM_FORMS, NUM_OF_FORM = 12, 4
"""Grids with their forms that are looked at closely, and plans of each."""
_NEAR = 1.5
"""A move of one layer does not make a plan better by as much."""
_FAR = 2.0
"""Prices of the plug-in so many times the least are not stock's best."""
_LINKS = {"H100-80GB": "360 GB/s", "B200": "700 GB/s", "A100-80GB": "240 GB/s"}
_COMMON = (
    "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
    "--attention-dropout 0 --hidden-dropout 0 --bf16 --calculate-per-token-loss "
    "--untie-embeddings-and-output-weights --sequence-parallel --use-distributed-optimizer "
    "--group-query-attention"
)
_MODELS = {
    "llama-1b": "16 2048 8192 32 8 64 128256",
    "llama-8b": "32 4096 14336 32 8 128 128256",
    "qwen-30b-a3b": "48 2048 6144 32 4 128 151936 128 8 768",
    "mixtral-8x7b": "32 4096 14336 32 8 128 32000 8 2 14336",
    "glm-4.5-air": "46 4096 10944 96 8 128 151552 128 8 1408 1408",
}
"""Layers, hidden, FFN, heads, query groups, head size, vocabulary; experts, top-k, columns of each,
of the shared one."""
_H, _A, _B = ("H100-80GB", 8), ("A100-80GB", 8), ("B200", 4)
_HALF_H, _HALF_A = ("H100-80GB", 4), ("A100-80GB", 4)
JOBS: dict[str, tuple[str, Sequence[tuple[str, int]], int, int]] = {
    # The four cases that were wrong.
    "llama-1b, 131,072 tokens, 2 x 4 H100": ("llama-1b", [_HALF_H] * 2, 131072, 32),
    "qwen-30b-a3b, 4 B200 + 4 H100": ("qwen-30b-a3b", [_B, _HALF_H], 4096, 64),
    "glm-4.5-air, 16 H100 + 16 A100": ("glm-4.5-air", [_H, _H, _A, _A], 4096, 128),
    "mixtral-8x7b, 16 H100 + 16 A100": ("mixtral-8x7b", [_H, _H, _A, _A], 4096, 128),
    # Twelve others.
    "llama-8b, 8 H100": ("llama-8b", [_H], 4096, 64),
    "llama-8b, 4 H100 + 4 A100": ("llama-8b", [_HALF_H, _HALF_A], 4096, 64),
    "llama-8b, 32,768 tokens, 8 H100": ("llama-8b", [_H], 32768, 16),
    "llama-8b, 32,768 tokens, 8 H100 + 8 A100": ("llama-8b", [_H, _A], 32768, 16),
    "llama-8b, 131,072 tokens, 16 H100": ("llama-8b", [_H, _H], 131072, 16),
    "llama-8b, 131,072 tokens, 64 H100": ("llama-8b", [_H] * 8, 131072, 16),
    "qwen-30b-a3b, 8 H100": ("qwen-30b-a3b", [_H], 4096, 64),
    "qwen-30b-a3b, 4 H100 + 4 A100": ("qwen-30b-a3b", [_HALF_H, _HALF_A], 4096, 16),
    "mixtral-8x7b, 8 B200": ("mixtral-8x7b", [("B200", 8)], 4096, 32),
    "mixtral-8x7b, 4 B200 + 4 H100": ("mixtral-8x7b", [_B, _HALF_H], 4096, 16),
    "mixtral-8x7b, 16 H100": ("mixtral-8x7b", [_H, _H], 4096, 16),
    "mixtral-8x7b, 32 H100": ("mixtral-8x7b", [_H] * 4, 4096, 32),
}


NUM_CASES = 4
"""The first jobs are those whose row was false."""


def cluster_text(name: str) -> str:
    """Write a job's cluster file."""
    _, machines, _, _ = JOBS[name]
    nodes = "".join(
        f"  - {{name: n{i:02d}, gpu: {gpu}, count: {count}, site: a}}\n"
        for i, (gpu, count) in enumerate(machines)
    )
    inside = "".join(
        f"    {gpu}: {{bandwidth: {_LINKS[gpu]}, latency: 5 us}}\n"
        for gpu in sorted({gpu for gpu, _ in machines})
    )
    text = f"version: 1\nnodes:\n{nodes}links:\n  inside_node:\n{inside}"
    if len(machines) > 1:
        text += "  between_nodes:\n    a: {bandwidth: 400 Gb/s, latency: 10 us}\n"
    return text


def job_flags(name: str) -> list[str]:
    """Return a job's flags for Megatron."""
    model, _, seq_length, batch = JOBS[name]
    sizes = _MODELS[model].split()
    names = (
        *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads"),
        *("num-query-groups", "kv-channels", "vocab-size", "num-experts", "moe-router-topk"),
        *("moe-ffn-hidden-size", "moe-shared-expert-intermediate-size"),
    )
    words = [w for n, size in zip(names, sizes, strict=False) for w in (f"--{n}", size)]
    for flag, value in (
        ("seq-length", seq_length),
        ("max-position-embeddings", seq_length),
        ("global-batch-size", batch),
        ("micro-batch-size", 1),
    ):
        words += [f"--{flag}", str(value)]
    if len(sizes) > 7:
        words.append("--moe-grouped-gemm")
    return [*words, *_COMMON.split()]


def job(name: str) -> tuple[Cluster, Workload]:
    """Return a job's cluster and workload."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(cluster_text(name))
        cluster = load_cluster(path)
    return cluster, load_workload(None, tuple(job_flags(name)))


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


def simulated(plan: Plan, cluster: Cluster) -> float:
    """Return the step as stock Megatron runs it; infinite where the plan does not fit."""
    try:
        step = simulate_plan(plan, cluster, is_stock=True)
    except HeteroError:
        return float("inf")
    if any(peak > s.capacity_bytes for s in step.timelines for peak in s.device_peak_bytes):
        return float("inf")
    return step.step_time_s


def enumerated(cluster: Cluster, workload: Workload) -> tuple[float, str, int]:
    """Return the best simulated step, its layout, and how many plans were priced.

    The cost model prices exchanges as the plug-in does them, so its order counts only among plans
    of one grid and one form: the best of each is simulated, and of the best grids and forms more.
    """
    number = 0
    groups: dict[tuple[object, ...], list[tuple[float, Plan]]] = {}
    for price_s, plan in plans(cluster, workload):
        number += 1
        first = plan.replicas[0].stages
        shape = replace(first[0].shape, num_layers=1)
        training = plan.workload.training if plan.workload else workload.training
        key = (
            *(len(plan.replicas), len(first), shape, plan.hosts, training.token_dispatcher),
            first[0].devices,
        )
        own = groups.setdefault(key, [])
        own.append((price_s, plan))
        own.sort(key=lambda entry: entry[0])
        del own[NUM_OF_FORM:]
    least_s = min((own[0][0] for own in groups.values()), default=0.0)
    ranked = sorted(
        (
            (simulated(own[0][1], cluster), index, own)
            for index, own in enumerate(groups.values())
            if own[0][0] <= _FAR * least_s
        ),
        key=lambda entry: entry[:2],
    )
    best_s, best = float("inf"), ""
    for _, _, own in ranked[:NUM_FORMS]:
        for _, plan in own:
            for made in chunked(plan):
                step_s = simulated(made, cluster)
                if step_s < best_s and is_stock(made):
                    best_s, best = step_s, str(made.layout)
    return best_s, best, number


def _folded(layout: str) -> str:
    """Write a layout's first replica, and how many it has."""
    replicas = layout.split(" | ")
    return f"{replicas[0]} x{len(replicas)}"


def plan_row(name: str) -> list[str]:
    """Return what the command `plan` says of a job."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(cluster_text(name))
        command = [sys.executable, "-m", "megatron_hetero", "plan", "--json", "--cluster"]
        done = subprocess.run(
            [*command, str(path), "--", *job_flags(name)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True,
        )  # fmt: skip
    said = json.loads(done.stdout)
    stock = said["best_stock"]
    by_hand = {found["strategy"]: f"{100 * found['slower_by']:+.1f}" for found in said["by_hand"]}
    step_s = said["step_time_s"]
    return [
        *(name, f"{step_s:.4f}", f"`{_folded(said['layout'])}`"),
        "-" if stock is None else f"{stock['step_time_s']:.4f}",
        "-" if stock is None else f"{100 * stock['slower_by']:+.1f}",
        "-" if stock is None else f"`{_folded(stock['layout'])}`",
        "-" if stock is None else stock["settings"] or "-",
        by_hand.get("by hand: equal layers, all GPUs", "-"),
        by_hand.get("by hand: without the slower cards", "-"),
    ]


def compared(name: str) -> tuple[list[str], bool]:
    """Return the row of a job, and whether the search is no slower than the enumeration."""
    cluster, workload = job(name)
    start = time.process_time()
    limits = limits_beside_a_plan(len(cluster.devices))
    found = best_stock_plan(make_problem(cluster, workload), limits)
    took_s = time.process_time() - start
    best_s, layout, number = enumerated(cluster, workload)
    own_s = float("inf") if found is None else found.step_time_s
    ratio = own_s / best_s
    layouts = ("" if found is None else str(found.plan.layout), layout)
    cells = [
        *(name, f"{own_s:.4f}", f"{took_s:.2f}", f"{best_s:.4f}", f"{number:,}"),
        *(f"{ratio:.4f}", *(f"`{_folded(one)}`" for one in layouts)),
    ]
    return cells, ratio <= 1 + 2 * limits.tolerance


def main() -> int:
    """Compare the jobs that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", metavar="JOB", choices=list(JOBS))
    names = parser.parse_args().only or list(JOBS)
    cases = [name for name in list(JOBS)[:NUM_CASES] if name in names]
    failed = 0
    print("| job | search s | CPU s | enumeration s | plans | ratio | search | enumeration |")
    print("| --- | --: | --: | --: | --: | --: | --- | --- |")
    for name in list(JOBS)[NUM_CASES:]:
        if name in names:
            cells, is_equal = compared(name)
            failed += not is_equal
            print(f"| {' | '.join(cells)} |", flush=True)
    titles = (
        *("job", "plan s", "plan", "best of stock s", "more %", "best of stock", "settings"),
        *("by hand, all GPUs, more %", "by hand, fast GPUs, more %"),
    )
    print(f"\n| {' | '.join(titles)} |")
    print("| --- | --: | --- | --: | --: | --- | --- | --: | --: |")
    for name in cases:
        print(f"| {' | '.join(plan_row(name))} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
