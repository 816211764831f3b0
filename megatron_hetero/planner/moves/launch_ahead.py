"""The last strategy: placements that come first once their launch counts hide their slow hops."""

from __future__ import annotations

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.completion.counts import search_counts, with_replicas
from megatron_hetero.planner.completion.fill import Filler
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.moves.local import climb, unlike_and_calm


class LaunchAhead:
    """Climbs from the best placements by their time with counts, which the strategies before did
    not look at; then searches the counts of the best, stage by stage."""

    name = "launch-ahead"

    def __init__(
        self,
        num_starts: int = 3,
        max_climb_work: int = 24_000,
        num_searched: int = 20,
        max_search_work: int = 400_000,
        max_gpus: int = 256,
    ) -> None:
        self.num_starts = num_starts
        self.max_climb_work = max_climb_work
        """Limit in stages priced, of all climbs together."""
        self.max_gpus = max_gpus
        """Above this none climbs: a move changes too little of a step (as in `local`)."""
        self.num_searched = num_searched
        self.max_search_work = max_search_work
        """Limit in stages times micro-batches, of all searches together."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        if not board.problem.costs.has_launch_counts:
            return
        filler = Filler(board.problem)

        def score(placement: Placement) -> Candidate | None:
            return board.score_with_counts(placement, self.name)

        is_small = board.problem.num_gpus <= self.max_gpus
        starts = unlike_and_calm(board.ranking_with_counts, self.num_starts) if is_small else []
        # Where counts have gained nothing yet, the climbs before have been here.
        work = self.max_climb_work // max(1, min(len(starts), self.num_starts))
        if any(start.has_counts for start in starts):
            for start in board.not_begun(self.name, starts):
                climb(board.problem, filler, score, start, work)
        best = board.ranking_with_counts[: self.num_searched]
        for candidate in board.not_begun(f"{self.name} counts", best):
            if board.may_lead(candidate.cost.least_step_s):
                self._search_counts(board, candidate, self.max_search_work // len(best))

    def _search_counts(self, board: Scoreboard, candidate: Candidate, max_work: int) -> None:
        """Better counts for the replica that ends last, as long as there are."""
        costs = board.problem.costs.sharded_as(candidate.placement)
        rows = costs.vocab_rows(candidate.placement.widths)
        cost = candidate.cost
        counted = list(zip(candidate.placement.replicas, cost.replicas, strict=True))
        improved = False
        while max_work > 0:
            last = max(range(len(counted)), key=lambda r: counted[r][1].pipeline_s)
            if counted[last][1].pipeline_s <= cost.card_s:
                break
            found, work = search_counts(costs, *counted[last], rows, max_work)
            max_work -= work
            if found == counted[last]:
                break
            counted[last], improved = found, True
        if improved:
            board.keep_counts(*with_replicas(costs, counted, rows), self.name)
