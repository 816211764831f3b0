"""Forms of groups that stock Megatron's flags can say: context parallelism, experts, settings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from math import gcd, lcm

from megatron_hetero.cost.choices import (
    ExpertGroups,
    cuts_heads,
    cuts_positions,
    may_choose,
    may_divide,
)
from megatron_hetero.cost.fp8_sizes import FP8_ROWS
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.model.micro_batches import size_changes_objective
from megatron_hetero.model.recompute import recomputed
from megatron_hetero.plan.plan import StageShape
from megatron_hetero.plan.stock_ranks import groups_fit
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks
from megatron_hetero.planner.stock.rates import GroupForm
from megatron_hetero.planner.stock.settings import StockRecompute, StockSettings

_STOCK_DIVIDES_WITH = frozenset(
    {"--moe-expert-capacity-factor", "--qk-clip", "--log-max-attention-logit"}
)
"""Flags with which Megatron can divide sequences but the plug-in cannot."""


def forms(
    problem: Problem, ranks: StockRanks, recomputes: Sequence[StockRecompute] | None = None
) -> Iterator[GroupForm]:
    """Yield every form of groups on some ranks, of one chunk a stage and undealt experts.

    Left out are forms that stock Megatron runs but that have a quicker like: where context-parallel
    size and micro-batch size have a common divisor c, c times as many replicas, with micro-batches
    of one c-th, have as many tokens on each GPU and as many micro-batches, and shorter rings of
    keys and values.  In the order `tp-dp-pp` the like has each stage on the same GPUs, in
    `tp-pp-dp` on as many of the same nodes.

    Args:
        problem: the job.
        ranks: the groups.
        recomputes: `kinds_of_recompute`, for who asks for thousands of ranks.
    """
    sizes = micro_batch_sizes(problem)
    kinds = kinds_of_recompute(problem) if recomputes is None else recomputes
    may_divide = len(sizes) > 1 and problem.cluster.limits.num_replicas is None
    for context in contexts(problem, ranks):
        for size in sizes:
            if may_divide and gcd(context, size) > 1:
                continue
            for recompute in kinds:
                yield GroupForm(ranks.width, context, StockSettings(size, recompute))


def contexts(problem: Problem, ranks: StockRanks) -> list[int]:
    """Return the context-parallel sizes that Megatron takes on some ranks (`validate_args`: two
    chunks of every sequence for each), with Transformer Engine's attention."""
    training, model = problem.workload.training, problem.workload.model
    nodes = [problem.cluster.node_by_name[name] for name in ranks.names]
    may = (
        all(uses_flash_attention(model, training, node.gpu_type) for node in nodes)
        and may_choose(problem.costs, "context_parallel")
        and may_divide(problem.workload, _STOCK_DIVIDES_WITH)
    )
    # Two chunks for each rank, whose tokens divide among TP ranks, and by 8 with fp8.
    parts = 2 * (ranks.width if training.sequence_parallel else 1)
    if training.fp8:
        parts = lcm(parts, FP8_ROWS)
    most = len(ranks.units) if may else 1
    return [
        size
        for size in range(1, most + 1)
        if len(ranks.units) % size == 0
        and (size == 1 or model.seq_length % (parts * size) == 0)
        and cuts_positions(problem.workload, size)
        and cuts_heads(problem.workload, ranks.width, size)
    ]


@lru_cache(maxsize=256)
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def groups_fit_grid(grid: StockGrid, groups: ExpertGroups | None) -> bool:
    """Return whether each group of experts is part of a stage or several whole stages, in the order
    of the ranks."""
    own = grid.ranks_of_stage
    shape = StageShape(grid.width, 1, None, grid.context_parallel, expert_groups=groups)
    if not groups_fit(shape, grid.num_stages, grid.rank_order):
        return False
    if groups is None:
        return True
    # Groups may reach over replicas, in whole stages.
    whole = groups[0] * groups[1]
    return own * grid.num_replicas % whole == 0 and (own % whole == 0 or whole % own == 0)


def kinds_of_recompute(problem: Problem) -> tuple[StockRecompute, ...]:
    """Return kinds of recompute: as needed of stages in one piece, none and full of others;
    selective, unless it spares only what flash attention does not keep anyway."""
    model, training = problem.workload.model, problem.workload.training
    gpu_types = {node.gpu_type.name: node.gpu_type for node in problem.nodes}
    flash = all(uses_flash_attention(model, training, own) for own in gpu_types.values())
    plain: tuple[StockRecompute, ...] = ("as needed", "none", "full")
    saves = recomputed(training, "selective") != {"core_attn"} or not flash
    return (*plain, "selective") if saves else plain


def micro_batch_sizes(problem: Problem) -> Sequence[int]:
    """Return micro-batch sizes, which divide the global batch: all, or the job's own where another
    would change what is trained, or where the cluster holds the job to it (`limits.as_given`)."""
    is_held = not may_choose(problem.costs, "micro_batch_size")
    if is_held or size_changes_objective(problem.workload):
        return (problem.workload.training.micro_batch_size,)
    return _divisors(problem.workload.training.global_batch_size)


def numbers_of_chunks(
    problem: Problem, grid: StockGrid, form: GroupForm, most: int
) -> tuple[int, ...]:
    """Return into how many chunks each stage of a grid may be cut; none where a replica has no
    whole micro-batches.

    Stages in several chunks are interleaved as Megatron demands of micro-batches and layers.
    Recompute by blocks is not for them, and all or nothing not for others.

    Args:
        problem: whose batch and layers are divided.
        grid: of ranks.
        form: of its groups.
        most: the largest number of chunks.
    """
    num_stages, settings = grid.num_stages, form.settings
    batch = problem.workload.training.global_batch_size
    number, rest = divmod(batch // grid.num_replicas, settings.micro_batch_size)
    if rest:
        return ()
    # Every chunk has a layer.
    most = min(most, problem.num_layers // num_stages)
    is_interleaved = num_stages > 1 and number % num_stages == 0
    is_interleaved &= settings.recompute != "as needed"
    return (
        *((1,) if most and settings.least_chunks == 1 else ()),
        *(range(2, most + 1) if is_interleaved else ()),
    )
