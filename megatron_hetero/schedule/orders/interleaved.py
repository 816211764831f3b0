"""Interleaved 1F1B: several model chunks on a stage, which shortens fill and drain.

The order of Megatron's `forward_backward_pipelining_with_interleaving` (Narayanan et al. 2021,
arXiv 2104.04473, sec. 2.2), here also for stages with unlike numbers of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.errors import CheckFailedError, PlanFormatError
from megatron_hetero.schedule.orders.list_schedule import Policy, TimedPipeline, list_schedule
from megatron_hetero.schedule.parts import ChunkTimes
from megatron_hetero.schedule.programme import Operation, Schedule, build_schedule


def interleaved(
    chain: Sequence[int], num_micro_batches: int, group_size: int | None = None
) -> Schedule:
    """Order every stage's chunks in turn, `group_size` micro-batches of one before the next.

    Forwards go by (group, chunk, micro-batch), backwards by (group, chunk from the last,
    micro-batch).  A stage launches as many forwards ahead of its first backward as there are before
    the first gradient can be back: those that its last chunk waits for, and two for each stage
    behind it.  Where the stages take turns along the chain that is Megatron's order.  With unlike
    numbers of chunks it would wait for itself; there the order is the one in which the stages come
    to their passes on a clock, each pass taking a unit of time (`schedule.orders.list_schedule`),
    with the same numbers under way.

    Args:
        chain: [virtual stage] -> stage; the first is stage 0, the last the last stage.
        group_size: Megatron's `microbatch_group_size_per_vp_stage`; by default the number of
            stages, as there.
    Raises:
        PlanFormatError: a group smaller than the pipeline, or a remainder smaller than it, for
            which the order would wait for itself.
    """
    # Megatron's limits on a group, and on the remainder of the micro-batches.
    num_stages = max(chain) + 1
    size = num_stages if group_size is None else group_size
    remainder = num_micro_batches % size
    if not num_stages <= size <= num_micro_batches or 0 < remainder < num_stages:
        raise PlanFormatError(
            f"interleaving takes groups of {num_stages} to {num_micro_batches} micro-batches (the "
            f"number of stages to that of micro-batches), and a last group of at least {num_stages}"
            f"; found groups of {size} for {num_micro_batches} micro-batches"
        )
    # Stages in turn are Megatron's own order; any other chain is made on a clock.
    counts = [list(chain).count(stage) for stage in range(num_stages)]
    if list(chain) != list(range(num_stages)) * counts[0]:
        return _unlike(tuple(chain), num_micro_batches, size, counts)
    # Every stage: its forwards in groups, its backwards in groups, `num_ahead` forwards before.
    orders = []
    for stage, num_chunks in enumerate(counts):
        forwards = _turns(num_micro_batches, range(num_chunks), size)
        backwards = _turns(num_micro_batches, range(num_chunks - 1, -1, -1), size)
        num_ahead = num_launched_ahead(num_stages, stage, num_chunks, size)
        orders.append(_one_in_turn(forwards, backwards, min(num_ahead, len(forwards))))
    return build_schedule(orders, num_micro_batches, chain)


def num_launched_ahead(num_stages: int, stage: int, num_chunks: int, size: int) -> int:
    """Count the forwards of the warm-up (Megatron's `get_pp_rank_microbatches`); there may be
    fewer."""
    return 2 * (num_stages - stage - 1) + (num_chunks - 1) * size


def _unlike(
    chain: tuple[int, ...], num_micro_batches: int, size: int, counts: Sequence[int]
) -> Schedule:
    # A clock on which every pass takes 1 and no message takes anything.
    unit, no_hop = ChunkTimes(1.0, 1.0, 1.0), BoundaryTime(0.0, 0.0)
    pipeline = TimedPipeline(
        chain,
        num_micro_batches,
        tuple((unit,) * count for count in counts),
        (no_hop,) * (len(chain) - 1),
        (no_hop,) * (len(chain) - 1),
    )
    limits = [num_launched_ahead(len(counts), s, count, size) + 1 for s, count in enumerate(counts)]
    # The least limits, one more on every stage each time, with which the clock comes to its end.
    while True:
        try:
            return list_schedule(pipeline, limits, Policy(group_size=size)).schedule
        except CheckFailedError:
            # Ends at the latest where a stage may have all its passes under way.
            limits = [limit + 1 for limit in limits]


def _turns(num_micro_batches: int, chunks: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return (micro-batch, chunk) in groups of `size` micro-batches."""
    return [
        (k, chunk)
        for first in range(0, num_micro_batches, size)
        for chunk in chunks
        for k in range(first, min(first + size, num_micro_batches))
    ]


def _one_in_turn(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], num_ahead: int
) -> list[Operation]:
    # Warm-up, then a forward and a backward in turn, then what is left of the backwards.
    order = [Operation("forward", k, chunk) for k, chunk in forwards[:num_ahead]]
    due = iter(backwards)
    for k, chunk in forwards[num_ahead:]:
        order.append(Operation("forward", k, chunk))
        order.append(Operation("backward", *next(due)))
    return order + [Operation("backward", k, chunk) for k, chunk in due]
