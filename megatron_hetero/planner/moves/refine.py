"""The last strategy: the best placements with settings of single stages.

It takes a short list of placements, also some that lacked memory, and chooses their layers and
settings anew (`refit`): recompute only where a stage needs it, micro-batch sizes that suit, the
optimizer's states where there is room, and groups of unequal shares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, repeat

from megatron_hetero.cost.choices import may_mix_sizes, micro_batch_sizes, shares_tokens
from megatron_hetero.cost.placement import Placement, with_optimizer_shares
from megatron_hetero.plan.stock_ranks import RankOrder
from megatron_hetero.planner.completion.counts import WORTH
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.canonical import canonical, is_symmetric
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.unlike import unlike, unlike_and_uncontended
from megatron_hetero.planner.moves.unlike_groups import in_unlike_parts, joined
from megatron_hetero.planner.refit.optimizer_shares import with_shares_by_room
from megatron_hetero.planner.refit.polish import Polish
from megatron_hetero.planner.refit.refit import (
    Filling,
    KnownOptions,
    Refitter,
    on_devices_of,
    share_batch,
)


class Refine:
    """Fills the best placements anew, then moves single layers and micro-batches."""

    name = "refine"

    def __init__(
        self,
        num_starts: int = 6,
        num_joined: int = 3,
        num_sizes: int = 2,
        num_polished: int = 4,
        max_work: int = 1_200_000,
    ) -> None:
        self.num_starts = num_starts
        """Of the placements that fit, and as many of those that lack memory."""
        self.num_joined = num_joined
        """Of these, the first ones whose stages are joined."""
        self.num_sizes = num_sizes
        """Micro-batch sizes that are priced exactly, of each placement."""
        self.num_polished = num_polished
        """Placements of unlike stages that are polished: the best before is often not after."""
        self.max_work = max_work
        """Limit in stages times micro-batches priced by small moves, of all placements."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        starts = unlike_and_uncontended(board.ranking_with_counts, self.num_starts)
        self.refine(board, starts + unlike(board.out_of_memory.fastest, self.num_starts))
        if shares_tokens(board.problem.costs):
            # Stages that divide sequences have settings of their own: they are no starts so far.
            more = in_unlike_parts(board.problem)
            self.refine(board, unlike(board.refined, self.num_joined), more)

    def refine(
        self, board: Scoreboard, starts: Sequence[Candidate], more: Iterable[Placement] = ()
    ) -> None:
        """Fill and polish placements that have not been before.

        Args:
            board: on which they are kept.
            starts: placements of the board.
            more: others, that are on none.
        """
        if not board.problem.costs.has_variants:
            return
        found: list[tuple[Candidate, Refitter]] = []
        known: KnownOptions = {}
        begun = enumerate(board.not_begun(self.name, starts))
        of_starts = (
            (placement, start)
            for number, start in begun
            for placement in self._placements(board, start, number < self.num_joined)
        )
        for placement, start in chain(of_starts, zip(more, repeat(None))):
            refitter = Refitter(board.problem.costs, placement, known)
            best = self._refined(board, refitter, start)
            if best is not None:
                found.append((best, refitter))
        found.sort(key=lambda entry: entry[0].key)
        refitters = {id(candidate): refitter for candidate, refitter in found}
        work_left = self.max_work
        chosen = unlike([candidate for candidate, _ in found], self.num_polished)
        for number, candidate in enumerate(chosen):
            refitter = refitters[id(candidate)]
            polish = Polish(refitter, candidate.placement)
            polished = polish.run(work_left // (len(chosen) - number))
            work_left -= polish.work
            if polished != candidate.placement:
                self._keep(board, refitter, candidate, polished)

    def _placements(self, board: Scoreboard, start: Candidate, join: bool) -> Iterator[Placement]:
        """Yield what is filled: the start, with the optimizer's states shared by free memory,
        and, if `join`, with stages joined into groups of unequal shares."""
        problem = board.problem
        # What is filled here keeps its layers whole.
        plain = tuple(replica.without_sharding for replica in start.placement.replicas)
        placement = replace(start.placement, replicas=plain)
        yield placement
        by_room = with_shares_by_room(problem.costs, placement)
        if by_room is not None:
            yield by_room
        if join:
            yield from joined(problem, Refitter(problem.costs, placement))

    def _refined(
        self, board: Scoreboard, refitter: Refitter, start: Candidate | None
    ) -> Candidate | None:
        """Return the best of the sizes, kept on the board; None where nothing fits or nothing
        changed."""
        costs, replicas = board.problem.costs, refitter.placement.replicas
        own = costs.workload.training.micro_batch_size
        sizes = micro_batch_sizes(costs, len(replicas))
        ranked = []
        for size in sizes:
            filled = _filled(refitter, [size] * len(replicas))
            if filled is not None:
                ranked.append((_quick_s(*filled), size, filled))
        ranked.sort(key=lambda entry: entry[:2])
        chosen = [filled for _, _, filled in ranked[: self.num_sizes]]
        if ranked and may_mix_sizes(costs):
            chosen.append(_mixed(refitter, ranked[0][1], sizes, ranked[0][2]))
        best: Candidate | None = None
        for filled in chosen:
            placement = Placement(
                tuple(
                    filling.replica(replica, count, own)
                    for replica, filling, count in zip(replicas, *filled, strict=True)
                )
            )
            kept = self._keep(board, refitter, start, placement)
            if kept is not None and (best is None or kept.key < best.key):
                best = kept
        return best

    def _keep(
        self, board: Scoreboard, refitter: Refitter, start: Candidate | None, placement: Placement
    ) -> Candidate | None:
        shares = [[stage.optimizer_share for stage in r.stages] for r in placement.replicas]
        if any(map(any, shares)) or placement.has_context_parallel:
            placement = with_optimizer_shares(placement, shares)  # of the layers as they are now
        if start is not None and placement == start.placement:
            return None
        placement, rank_order = arranged(placement, board.problem.gpus, start)
        cost = refitter.cost(placement)
        return board.keep_refined(placement, cost, self.name, rank_order)


Filled = tuple[Sequence[Filling], Sequence[int]]
"""Fillings of all replicas, and their micro-batches."""


def _filled(refitter: Refitter, sizes: Sequence[int]) -> Filled | None:
    """Return all replicas filled for the micro-batch sizes given, [replica]; None if one does
    not fit."""
    batch = refitter.costs.workload.training.global_batch_size
    fillings, left = [], batch - sum(sizes)
    for replica, size in zip(refitter.placement.replicas, sizes, strict=True):
        most = left // size + 1
        filling = refitter.filling(replica, size, most) if most > 0 else None
        if filling is None:
            return None
        fillings.append(filling)
    counts = share_batch(batch, fillings)
    return None if counts is None else (fillings, counts)


def _mixed(refitter: Refitter, size: int, sizes: Sequence[int], filled: Filled) -> Filled:
    """Try, from one size for all, other sizes for replicas of one shape after the other, while that
    lets the last one end earlier."""
    shapes = [refitter.shape(replica) for replica in refitter.placement.replicas]
    chosen = dict.fromkeys(shapes, size)
    for shape in list(chosen):
        for other in sizes:
            trial = _filled(refitter, [{**chosen, shape: other}[of] for of in shapes])
            if trial is not None and _quick_s(*trial) < WORTH * _quick_s(*filled):
                chosen[shape], filled = other, trial
    return filled


def _quick_s(fillings: Sequence[Filling], counts: Sequence[int]) -> float:
    """Return about when the last replica ends."""
    return max(f.fill_s + (m - 1) * f.period_s for f, m in zip(fillings, counts, strict=True))


def arranged(
    placement: Placement, gpus: Mapping[str, tuple[int, ...]], start: Candidate | None = None
) -> tuple[Placement, RankOrder | None]:
    """Return the placement and the order of its ranks if stock Megatron runs it: all replicas
    and stages alike in what they do.  Where it did not run the start, replicas and GPUs are put
    in order."""
    first = placement.replicas[0]
    alike = is_symmetric(placement) and all(
        replica.launch_counts is None
        and all(stage.shares is None and stage.sharding is None for stage in replica.stages)
        and all(stage.expert_shares is None for stage in replica.stages)
        and replica.micro_batch_size == first.micro_batch_size
        and all(stage.own_settings == first.stages[0].own_settings for stage in replica.stages)
        for replica in placement.replicas
    )
    if not alike:
        return placement, None
    if start is not None and start.rank_order is not None:
        return placement, start.rank_order
    bare, rank_order = canonical(placement, gpus)
    if rank_order is None:
        return placement, None
    return Placement(tuple(on_devices_of(first, replica) for replica in bare.replicas)), rank_order
