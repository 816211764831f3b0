"""Plans for stock Megatron, and the parts of plans beyond Megatron's flags."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.model.blocks import divides_experts
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.workload import divided_sizes
from megatron_hetero.plan.chunks import chain, stage_chunks
from megatron_hetero.plan.in_flight import default_launched_forwards
from megatron_hetero.plan.plan import Plan, Replica, Stage
from megatron_hetero.plan.stock_ranks import (
    RANK_ORDERS,
    NodeGrid,
    find_stock_arrangement,
    node_grid,
    rank_orders,
    ranks_follow,
    split_node,
)
from megatron_hetero.schedule.of_plan import of_orders
from megatron_hetero.schedule.orders.interleaved import interleaved


def is_stock(plan: Plan) -> bool:
    """Return whether stock Megatron, without the plug-in, runs exactly this plan.

    All replicas have the same stages, one tensor-parallel width, one context-parallel size, one way
    of dealing experts out, one micro-batch count and size; every stage follows the same settings;
    and the ranks bind to places in one of Megatron's two orders.  `plan` is valid.
    """
    return not reasons_not_stock(plan)


def sends_as_stock(plan: Plan, workload: Workload | None = None) -> bool:
    """Return whether a plan is priced with stock Megatron's waited sends: wherever stock Megatron
    can run the plan, unless the job says otherwise (`TrainingSpec.sends`).

    Args:
        workload: the job, where it is not the plan's own.
    """
    job = workload or plan.workload
    return (job is None or job.training.stock_waits) and is_stock(plan)


def reasons_not_stock(plan: Plan) -> tuple[str, ...]:
    """Explain in words what stock Megatron cannot express of the plan; empty for a stock plan."""
    # Shapes alone where they differ: settings and the order of ranks mean nothing then.
    return tuple(_shape_reasons(plan)) or (*_setting_reasons(plan), *_rank_reasons(plan))


def num_reasons_not_stock(plan: Plan) -> int:
    """Count the obstacles between the plan and stock Megatron; those of its settings count beside
    those of its shape, which `reasons_not_stock` names alone."""
    num = sum(1 for _ in _shape_reasons(plan)) + sum(1 for _ in _setting_reasons(plan))
    return num or sum(1 for _ in _rank_reasons(plan))


def _shape_reasons(plan: Plan) -> Iterator[str]:
    first = plan.replicas[0]
    if len(plan.layout.tensor_parallel_widths) > 1:
        widths = ", ".join(map(str, plan.layout.tensor_parallel_widths))
        yield f"stages of different tensor-parallel widths ({widths})"
    # Depth, then layers: the second is named only where the first is equal.
    if any(len(replica.stages) != len(first.stages) for replica in plan.replicas):
        yield "replicas of different pipeline depths"
    elif any(chained_layers(replica) != chained_layers(first) for replica in plan.replicas):
        yield "replicas with different layers in a stage"
    if any(r.num_micro_batches != first.num_micro_batches for r in plan.replicas):
        yield "replicas with different numbers of micro-batches"
    if len({micro_batch_size(plan, replica) for replica in plan.replicas}) > 1:
        yield "replicas with different micro-batch sizes"
    yield from _expert_reasons(plan)
    if plan.layout.has_sharded_layers:
        yield "layers with sharded weights (z)"
    yield from _context_reasons(plan)
    if any(_is_uneven(plan, stage) for replica in plan.replicas for stage in replica.stages):
        yield "tensor-parallel groups of uneven shares"


def _expert_reasons(plan: Plan) -> Iterator[str]:
    """Yield what `--expert-model-parallel-size` and `--expert-tensor-parallel-size` cannot say."""
    shapes = [stage.shape for replica in plan.replicas for stage in replica.stages]
    # Flags say one way of dealing experts out for all stages.
    if len({(shape.expert_shares, shape.expert_groups) for shape in shapes}) > 1:
        yield "stages that deal experts out differently (ep)"
        return
    table = shapes[0].expert_shares
    if table and len(set(table)) > 1:
        yield "unequal numbers of experts on the devices of a stage (ep)"
    model = None if plan.workload is None else plan.workload.model
    if model and not all(divides_experts(model, shape.expert_width) for shape in shapes):
        yield "experts with biases that are divided (etp)"


def _context_reasons(plan: Plan) -> Iterator[str]:
    """Yield the parts of a plan's context parallelism beyond Megatron's flags or the job's
    attention."""
    shapes = [stage.shape for replica in plan.replicas for stage in replica.stages]
    if not plan.layout.has_context_parallel:
        return
    # One size for all stages, in equal parts of a sequence.
    if len({shape.context_parallel for shape in shapes}) > 1:
        yield "stages of different context-parallel sizes (cp)"
    if plan.layout.has_uneven_context_parallel:
        yield "unequal shares of a sequence (cp)"
    # Megatron's local attention refuses to divide sequences (`DotProductAttention`).
    if plan.workload is None or not plan.workload.training.flash_attention:
        yield "sequences divided without Transformer Engine's attention (cp)"


def _setting_reasons(plan: Plan) -> Iterator[str]:
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    if common_recompute(plan) is None:
        yield "stages with different recompute"
    # A precision that is the job's anyway is no setting of its own.
    precision = None if plan.workload is None else plan.workload.training.precision
    if any(stage.precision not in (None, precision) for stage in stages):
        yield "stages with a precision of their own"
    # Megatron runs one other order than 1F1B: its own interleaved one.
    if any(stage.order is not None for stage in stages) and not _is_interleaved_as_megatron(plan):
        yield "stages with an order of their own"
    if plan.exchange_groups:
        yield "gradients exchanged by groups of machines"
    if len({stage.optimizer_share or 1 for stage in stages}) > 1:
        yield "unequal shares of the optimizer's state"
    # Replicas with counts that Megatron would not choose.
    ahead = [
        str(r)
        for r, replica in enumerate(plan.replicas)
        if any(
            stage.num_launched_forwards not in (None, default_launched_forwards(plan, r, s))
            for s, stage in enumerate(replica.stages)
        )
    ]
    if ahead:
        name = "replica" if len(ahead) == 1 else "replicas"
        counts = "launch counts (forwards before the first backward)"
        yield f"{counts} other than 1F1B's ({name} {', '.join(ahead)})"


def _rank_reasons(plan: Plan) -> Iterator[str]:
    if rank_orders(plan):
        return
    # The ranks follow one of Megatron's orders, but its groups of experts in that order are other
    # ones.
    if ranks_follow(plan):
        yield (
            "groups of experts other than a stage's own ranks, where the ranks follow the pipeline "
            "before the replicas (--use-tp-pp-dp-mapping)"
        )
    else:
        yield _rank_reason(node_grid(plan))


def _rank_reason(nodes: NodeGrid) -> str:
    if find_stock_arrangement(nodes) is not None:
        return (
            "ranks in neither of Megatron's two orders (with hosts, their GPUs and replicas listed "
            "in another order they are: plan again)"
        )
    # However they are listed, some node is parted; the plan's own order of replicas shows how.
    examples = {
        "ranks {1} and {2} on {0}".format(*found): order
        for order in RANK_ORDERS
        if (found := split_node(nodes, order))
    }
    shown = examples if len(examples) == 1 else (f"{o}: {words}" for words, o in examples.items())
    return (
        "stages that return to a node, whose GPUs stock Megatron numbers one after the other ("
        f"{', '.join(shown)})"
    )


def _is_interleaved_as_megatron(plan: Plan) -> bool:
    """Return whether the orders match Megatron's interleaved schedule, with chunks in turn."""
    for replica in plan.replicas:
        # Megatron gives each stage as many chunks as any other, in turn along the stages.
        on_stage, num_stages = chain(replica), len(replica.stages)
        num_chunks, rest = divmod(len(on_stage), num_stages)
        if rest or num_chunks < 2 or on_stage != tuple(range(num_stages)) * num_chunks:
            return False
        orders = tuple([stage.order for stage in replica.stages])
        if not _is_megatrons(orders, on_stage, replica.num_micro_batches):
            return False
    return True


@lru_cache(maxsize=16)
def _is_megatrons(
    orders: tuple[str | None, ...], chain: tuple[int, ...], num_micro_batches: int
) -> bool:
    """Return whether these orders of the stages are Megatron's; a plan is asked many times, and
    replicas alike share the answer."""
    given = [order for order in orders if order is not None]
    if len(given) < len(orders):
        return False
    try:
        megatrons = interleaved(chain, num_micro_batches)
    except PlanFormatError:
        return False
    return of_orders(tuple(given), num_micro_batches, chain) == megatrons


def chained_layers(replica: Replica) -> list[int]:
    """Count the layers of each chunk along the chain of model chunks."""
    pieces = [chunk for stage in replica.stages for chunk in stage_chunks(stage)]
    return [chunk.num_layers for chunk in sorted(pieces, key=lambda c: c.first_layer)]


def _is_uneven(plan: Plan, stage: Stage) -> bool:
    """Return whether a stage's shares are unequal; equal ones (1:1) are stock's own where the width
    divides everything."""
    shares = stage.shape.shares
    if shares is None:
        return False
    # Without a model equal shares may still not divide: they count as uneven.
    if len(set(shares)) > 1 or plan.workload is None:
        return True
    return any(units % len(shares) for *_, units in divided_sizes(plan.workload.model))


def micro_batch_size(plan: Plan, replica: Replica) -> int | None:
    """Return the sequences in a micro-batch of a replica; None if neither plan nor workload
    says."""
    if replica.micro_batch_size is not None or plan.workload is None:
        return replica.micro_batch_size
    return plan.workload.training.micro_batch_size


def common_micro_batch_size(plan: Plan) -> int | None:
    """Return the sequences in a micro-batch of every replica; None where they differ or nothing
    says."""
    sizes = {micro_batch_size(plan, replica) for replica in plan.replicas}
    return sizes.pop() if len(sizes) == 1 else None


def recompute(plan: Plan, stage: Stage) -> tuple[str | None, int | None]:
    """Return the granularity and the number of recomputed layers (None: all) of a stage.

    The granularity is None if neither stage nor workload says.
    """
    if stage.recompute is not None:
        return stage.recompute, stage.recompute_num_layers
    return (None if plan.workload is None else plan.workload.training.recompute), None


def common_recompute(plan: Plan) -> tuple[str | None, int | None] | None:
    """Find the recompute of all stages in the terms of a job's flags; None if no flags express it.

    Megatron recomputes one number of layers of every stage (`--recompute-method block`), or all
    layers of the stages that have fewer.
    """
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    found = {recompute(plan, stage) for stage in stages}
    if len(found) == 1:
        return found.pop()
    # A lesser count passes if it is all layers of its stage, where the largest has the same effect.
    counts = [count for _, count in found if count is not None]
    if {granularity for granularity, _ in found} != {"full"} or len(counts) < len(found):
        return None
    most = max(counts)
    fits = all(stage.recompute_num_layers in (most, stage.shape.num_layers) for stage in stages)
    return ("full", most) if fits else None
