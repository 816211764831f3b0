"""Flags that a plan decides: their values, and the conflicts with flags of the user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hetero.flags.stock import is_even_split, pipeline_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.stock_ranks import expert_sizes, rank_orders
from megatron_hetero.schedule.stock import (
    common_micro_batch_size,
    common_recompute,
    micro_batch_size,
)


@dataclass(frozen=True)
class Decision:
    """Value that a plan gives to a Megatron flag.

    `values` are the arguments of the flag: empty for a switch, None if every use of the flag
    contradicts the plan. `printed` flags are written where the user has not given them. `meaning`
    says in words what the plan has, for error messages.
    """

    name: str
    values: tuple[str, ...] | None
    meaning: str
    printed: bool = False


_GROUP_SIZE = "--microbatch-group-size-per-virtual-pipeline-stage"


def stock_decisions(plan: Plan, job_micro_batch_size: int | None = None) -> Iterator[Decision]:
    """Yield the decisions of a plan that stock Megatron expresses (`stock.is_stock`).

    `job_micro_batch_size` is the user's, in sequences; it counts for replicas without a size in the
    plan.
    """
    replica = plan.replicas[0]
    width, depth = replica.stages[0].shape.tensor_parallel, len(replica.stages)
    # Stock Megatron has one width and one depth for all replicas.
    yield _number("--tensor-model-parallel-size", width, "tensor-parallel width", printed=True)
    yield _number("--pipeline-model-parallel-size", depth, "pipeline depth", printed=True)
    # Equal stages are Megatron's default, and need no layout.
    if is_even_split(plan):
        yield Decision("--pipeline-model-parallel-layout", None, "equal stages")
    else:
        layout = pipeline_layout(plan)
        yield Decision(
            "--pipeline-model-parallel-layout", (layout,), f"stages {layout}", printed=True
        )
    # Megatron's own group of micro-batches is the pipeline's depth.
    if plan.replicas[0].stages[0].chunks:
        meaning = "groups of micro-batches of interleaved stages"
        yield _number(_GROUP_SIZE, depth, meaning)
    # The order of ranks that the plan's devices follow; either fits where one axis has size 1.
    orders = rank_orders(plan)
    if "tp-dp-pp" not in orders:
        meaning = "ranks that follow the pipeline before the replicas"
        yield Decision("--use-tp-pp-dp-mapping", (), meaning, printed=True)
    elif "tp-pp-dp" not in orders:
        meaning = "ranks that follow the replicas before the pipeline"
        yield Decision("--use-tp-pp-dp-mapping", None, meaning)
    # Without a size in plan and job the flag is left to the user.
    size = micro_batch_size(plan, replica) or job_micro_batch_size
    if size is not None:
        yield _number("--micro-batch-size", size, "micro-batch size", printed=True)
    yield from _recompute_decisions(plan)
    yield from _stock_group_decisions(plan)
    yield from _common_decisions(plan, job_micro_batch_size)


def _stock_group_decisions(plan: Plan) -> Iterator[Decision]:
    """Yield the sizes of context-parallel groups and of groups of experts; each flag is written
    only where it is not Megatron's default."""
    # All stages of a stock plan have one shape but for their layers.
    shape = plan.replicas[0].stages[0].shape
    width, context = shape.tensor_parallel, shape.context_parallel
    meaning = "context-parallel size"
    yield _number("--context-parallel-size", context, meaning, printed=context > 1)
    meaning = "tensor-parallel width, and no more shards of a weight,"
    yield _number("--tensor-parallel-num-weight-shards", width, meaning)
    size, own = expert_sizes(shape)
    yield _number("--expert-model-parallel-size", size, "expert-parallel size", printed=size > 1)
    meaning = "tensor-parallel width of experts"
    yield _number("--expert-tensor-parallel-size", own, meaning, printed=own != width)
    yield _number("--expert-tensor-parallel-num-weight-shards", own, meaning)


def hetero_decisions(plan: Plan, job_micro_batch_size: int | None = None) -> Iterator[Decision]:
    """Yield the decisions of a plan that needs the plug-in; `emit` writes the `--hetero-` flags.

    `job_micro_batch_size` is the user's, in sequences; it counts where plan and workload have none.
    """
    widths = plan.layout.tensor_parallel_widths
    depths = tuple(sorted({len(replica.stages) for replica in plan.replicas}))
    # A flag of one value agrees only where all stages have that value.
    yield _same_everywhere("--tensor-model-parallel-size", widths, "tensor-parallel width")
    yield _same_everywhere("--pipeline-model-parallel-size", depths, "pipeline depth")
    # The plan says these stage by stage, so any use of these flags contradicts it.
    named = "its own layers for each stage"
    yield Decision(_GROUP_SIZE, None, "its own order of computations")
    yield Decision("--pipeline-model-parallel-layout", None, named)
    yield Decision("--use-tp-pp-dp-mapping", None, "its own order of ranks")
    # Replicas of unlike sizes leave the job's flag alone, but Megatron always wants one.
    size = common_micro_batch_size(plan) or plan.replicas[0].micro_batch_size
    if plan.workload is not None:
        of_job, common = plan.workload.training.micro_batch_size, common_micro_batch_size(plan)
        # A script of the user's may keep the job's: each replica has its own size in the plan.
        size = of_job if common is None or job_micro_batch_size == of_job else common
    elif job_micro_batch_size is not None:
        size = job_micro_batch_size
    if size is not None:
        yield _number("--micro-batch-size", size, "micro-batch size", printed=True)
    yield from _hetero_group_decisions(plan)
    yield from _common_decisions(plan, job_micro_batch_size)


def _hetero_group_decisions(plan: Plan) -> Iterator[Decision]:
    # Each stage has its own size, so that no value of the flag is right.
    if plan.layout.has_context_parallel:
        yield Decision("--context-parallel-size", None, "context parallelism of each stage")
    else:
        yield _number("--context-parallel-size", 1, "context-parallel size")
    widths = plan.layout.tensor_parallel_widths
    meaning = "tensor-parallel width, and no more shards of a weight,"
    yield _same_everywhere("--tensor-parallel-num-weight-shards", widths, meaning)
    shapes = [stage.shape for replica in plan.replicas for stage in replica.stages]
    if any(shape.expert_shares or shape.expert_groups for shape in shapes):
        yield Decision("--expert-tensor-parallel-num-weight-shards", None, "whole experts")
        yield Decision("--expert-model-parallel-size", None, "experts dealt out in each stage")
        yield Decision("--expert-tensor-parallel-size", None, "experts dealt out in each stage")
    else:
        yield _number("--expert-model-parallel-size", 1, "expert-parallel size")
        meaning = "tensor-parallel width of experts"
        yield _same_everywhere("--expert-tensor-parallel-size", widths, meaning)
        yield _same_everywhere("--expert-tensor-parallel-num-weight-shards", widths, meaning)


def _common_decisions(plan: Plan, job_micro_batch_size: int | None) -> Iterator[Decision]:
    # All replicas hold the same model.
    num_layers = plan.layout.replicas[0].num_layers
    yield _number("--num-layers", num_layers, "layers")
    yield _number("--encoder-num-layers", num_layers, "layers")
    # Sequences of each replica in a step; without every size the global batch is unknown.
    parts = [
        replica.num_micro_batches * size
        for replica in plan.replicas
        if (size := micro_batch_size(plan, replica) or job_micro_batch_size) is not None
    ]
    if len(parts) == len(plan.replicas):
        total = sum(parts)
        yield _number("--global-batch-size", total, "global batch", printed=True)
    # What would divide the pipeline a second time.
    for name in (
        "--num-layers-per-virtual-pipeline-stage",
        "--num-virtual-stages-per-pipeline-rank",
    ):
        yield Decision(name, None, "no interleaved (virtual) stages")
    for name in (
        "--decoder-first-pipeline-num-layers",
        "--decoder-last-pipeline-num-layers",
        "--account-for-embedding-in-pipeline-split",
        "--account-for-loss-in-pipeline-split",
        "--hybrid-layer-pattern",
        "--hybrid-override-pattern",
    ):
        yield Decision(name, None, "its own layers for each stage")


def _recompute_decisions(plan: Plan) -> Iterator[Decision]:
    """Yield the recompute flags, only where the stages differ from the job's own setting."""
    # Flags say one recompute for all stages, where the stages have one.
    granularity, num_layers = common_recompute(plan) or (None, None)
    job = None if plan.workload is None else plan.workload.training.recompute
    if granularity is None or (granularity == job and num_layers is None):
        return
    meaning = f"{granularity} recompute"
    if granularity != "selective":
        yield Decision("--recompute-activations", None, meaning)
    if granularity == "none":
        yield Decision("--recompute-granularity", None, meaning)
        return
    yield Decision("--recompute-granularity", (granularity,), meaning, printed=True)
    if granularity == "selective":
        return
    # All layers, each by itself, or the first `count` of every stage.
    method, count = ("uniform", 1) if num_layers is None else ("block", num_layers)
    yield Decision("--recompute-method", (method,), f"{method} {meaning}", printed=True)
    yield _number("--recompute-num-layers", count, "recomputed layers", printed=True)


def _number(name: str, value: int, what: str, *, printed: bool = False) -> Decision:
    return Decision(name, (str(value),), f"{what} {value}", printed)


def _same_everywhere(name: str, values: tuple[int, ...], what: str) -> Decision:
    """Return a decision that allows a flag only if all stages share the flag's value."""
    shown = f"{what} {', '.join(map(str, values))}"
    return Decision(name, (str(values[0]),) if len(values) == 1 else None, shown)
