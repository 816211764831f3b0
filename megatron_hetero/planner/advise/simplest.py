"""The plan nearest to stock Megatron within a part of the best.

Nearest is the first in this order: what stock Megatron runs; fewer reasons for the plug-in
(`schedule.stock.num_reasons_not_stock`); fewer unlike things (widths, depths, layers of a stage's
place, numbers and sizes of micro-batches, settings of stages, groups of experts, groups of
machines that exchange gradients, launch counts); and faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.share import even_share_or_none
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.schedule.stock import num_reasons_not_stock

USUAL_PART = 0.05
"""The default part by which the simplest plan may be slower than the best."""
_MAX_WORK = 10_000
"""Stages of the placements compared."""


def simplest(board: Scoreboard, best: Candidate, within: float) -> Candidate:
    """Return the plan nearest to stock, among placements kept by the search and settings-free forms
    of the best of them; `best` if none is nearer.

    Args:
        within: of the best's step time, or of what the objective makes small.
    """
    most = _most_compared(best)
    known: dict[Placement, Candidate] = {best.placement: best}
    for candidate in _kept(board, most):
        if _is_near(candidate, best, within):
            known.setdefault(candidate.placement, candidate)
    few = sorted(known.values(), key=lambda c: (not c.is_stock, num_unlike(c.placement), c.key))
    rescorer = Rescorer(board)
    for candidate in _ranked(board, few[:most]):
        if candidate.placement == best.placement or not rescorer.may_simulate(candidate):
            break
        # Without its queues a placement is never slower than with them.
        simulated = rescorer.with_queues(candidate)
        if simulated.keeps_limits and _is_near(simulated, best, within):
            return simulated
    return best


def num_unlike(placement: Placement) -> int:
    """Return how many things of the replicas and stages are not all alike."""
    stages = [(i, s) for r in placement.replicas for i, s in enumerate(r.stages)]
    # A set for each kind of thing, which has one member where all are alike.
    kinds = (
        {(s.width, s.shares, s.context_parallel, s.context_shares) for _, s in stages},
        {len(r.stages) for r in placement.replicas},
        {tuple(s.num_layers for s in r.stages) for r in placement.replicas},
        {s.num_layers for _, s in stages},
        {r.num_micro_batches for r in placement.replicas},
        {r.micro_batch_size for r in placement.replicas},
        {s.own_settings for _, s in stages},
        {s.expert_groups for _, s in stages},
        {bool(placement.exchange_groups), False},
        {r.launch_counts is not None for r in placement.replicas} | {False},
    )
    return sum(len(kind) - 1 for kind in kinds)


def _ranked(board: Scoreboard, few: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield candidates nearest to stock Megatron first; reasons for the plug-in are counted only if
    no stock candidate was enough."""
    yield from (candidate for candidate in few if candidate.is_stock)
    others = [candidate for candidate in few if not candidate.is_stock]
    plans = (bare_plan(board.problem, candidate, {}) for candidate in others)
    reasons = list(map(num_reasons_not_stock, plans))
    yield from (others[i] for i in sorted(range(len(others)), key=lambda i: (reasons[i], i)))


def _most_compared(best: Candidate) -> int:
    num_stages = sum(len(replica.stages) for replica in best.placement.replicas)
    return max(1, _MAX_WORK // num_stages)


def _kept(board: Scoreboard, most: int) -> Iterator[Candidate]:
    yield from board.ranking_of_stock
    ranking = board.ranking_of_all
    yield from ranking
    # The best few also without settings, in case that costs little.
    for candidate in ranking[:most]:
        if _can_be_plain(board, candidate.placement):
            # Without launch counts and settings of its stages; its micro-batches stay as they are.
            plain = board.score(candidate.placement, "simplest", whole=True)
            if plain is not None:
                yield plain


def _can_be_plain(board: Scoreboard, placement: Placement) -> bool:
    """Return whether a placement reduced to GPUs, layers and numbers of micro-batches can be run:
    in equal parts, of whole sequences, of the job's size."""
    model = board.problem.workload.model
    stages = [stage for replica in placement.replicas for stage in replica.stages]
    return all(r.micro_batch_size is None for r in placement.replicas) and all(
        s.context_parallel == 1 and even_share_or_none(model, s.width) is not None for s in stages
    )


def _is_near(candidate: Candidate, best: Candidate, within: float) -> bool:
    """Return whether the candidate keeps the limits and is at most `within` behind the best."""
    if not candidate.keeps_limits:
        return False
    # By money or GPUs where the objective asks for them, by the step else.
    if best.standing.value:
        return candidate.standing.value <= (1 + within) * best.standing.value
    return candidate.step_time_s <= (1 + within) * best.step_time_s
