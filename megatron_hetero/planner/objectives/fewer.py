"""Plans on some of the machines: where money or GPUs count, the fastest plan is not the best."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import sqrt

from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate.candidate import NUM_TAKEN, is_plain
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import Standing
from megatron_hetero.planner.objectives.node_pools import (
    MAX_SELECTIONS,
    Promise,
    Selection,
    neighbours,
    node_pools,
    promise,
    restricted,
    some_selections,
)
from megatron_hetero.planner.strategy import Strategy

_NUM_ANYWAY = 4
"""Most promising selections, planned whatever the whole cluster's slack makes of the promises: a
cluster on slow links may lose far more than one of its machines by itself."""

CoarseKey = tuple[Standing, float]
MakeStrategies = Callable[[], Sequence[Strategy]]


class FewerMachines:
    """Plans quickly on many selections of machines, from the most promising on, climbs from the
    best of them machine by machine, and searches the best few thoroughly.

    What a selection promises by its work alone leaves most of them out.
    """

    name = "fewer-machines"

    def __init__(
        self, thorough: MakeStrategies, num_thorough: int = 2, max_searches: int = 32
    ) -> None:
        self.thorough = thorough
        self.num_thorough = num_thorough
        self.max_searches = max_searches
        """Limit of the quick searches, and again of those while climbing."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        search = _Search(board)
        # The most promising selections are planned quickly, then the best of them are varied.
        ranked = search.ranked(some_selections(search.pools, MAX_SELECTIONS))
        search.quickly(ranked, self.max_searches, num_anyway=_NUM_ANYWAY)
        search.climb(self.max_searches)
        for selection in search.worth_more(self.num_thorough):
            search.plan(selection, self.thorough())


class _Search:
    """Selections of one board's machines, with promised steps and the plans found."""

    def __init__(self, board: Scoreboard) -> None:
        self.board = board
        self.problem = board.problem
        self.pools = node_pools(board.problem)
        self.found: dict[Selection, CoarseKey | None] = {}
        self._promises: dict[Selection, Promise] = {}
        everything = tuple(pool.most for pool in self.pools)
        fastest_s = min((c.step_time_s for c in board.ranking), default=None)
        self.slack = 1.0 if fastest_s is None else fastest_s / self.promise(everything).step_s
        """Real step times over promised ones, as the whole cluster has it."""

    def promise(self, selection: Selection) -> Promise:
        """Return what no plan on a selection beats."""
        if selection not in self._promises:
            self._promises[selection] = promise(self.problem, self.pools, selection)
        return self._promises[selection]

    def key(self, selection: Selection, slack: float = 1.0) -> CoarseKey:
        """Return the best possible key of a plan on exactly these machines, with steps `slack`
        times as long as promised."""
        promised = self.promise(selection)
        step_s = slack * promised.step_s
        standing = self.problem.objective.standing_of(
            self.problem.cluster, promised.num_gpus, step_s, promised.price
        )
        return standing, step_s

    def ranked(self, selections: Iterable[Selection]) -> list[Selection]:
        """Return the most promising first; of equals the smallest."""
        return sorted(selections, key=lambda s: (self.key(s, self.slack), sum(s), s))

    def may_win(self, selection: Selection) -> bool:
        """Return whether the selection is likely to beat the board's best: steps are longer than
        promised, if less so on fewer machines."""
        # The root, because fewer machines lose less than the whole cluster does; plans that were
        # found on some may show that these lose less still.
        seen = [key[1] / self.promise(s).step_s for s, key in self.found.items() if key]
        return self._may_win(selection, min([sqrt(self.slack), *seen]))

    def _may_win(self, selection: Selection, slack: float) -> bool:
        best = self.board.wanted
        return best is None or self.key(selection, slack) < best.coarse_key

    def quickly(self, selections: Iterable[Selection], most: int, num_anyway: int = 0) -> None:
        """Plan on the first selections with a chance to win, and on the first `num_anyway` of those
        whose promises do not rule them out."""
        for selection in selections:
            if not most or selection in self.found:
                continue
            is_first = num_anyway > 0 and self._may_win(selection, 1.0)
            if is_first or self.may_win(selection):
                most, num_anyway = most - 1, num_anyway - is_first
                self.plan(selection, [Columns()])

    def climb(self, most: int) -> None:
        """Climb from the best selection to better neighbours."""
        limit = len(self.found) + most
        best = self._best()
        while best is not None and len(self.found) < limit:
            near = self.ranked(neighbours(self.pools, best))
            self.quickly(near, limit - len(self.found))
            if (found := self._best()) == best:
                return
            best = found

    def _best(self) -> Selection | None:
        fitting = {s: key for s, key in self.found.items() if key is not None}
        return min(fitting, key=lambda s: (fitting[s], s), default=None)

    def worth_more(self, most: int) -> list[Selection]:
        """Return the best selections, and the most promising of the rest with a chance to win."""
        fitting = {s: key for s, key in self.found.items() if key is not None}
        ranked = sorted(fitting, key=lambda s: (fitting[s], s))
        chosen = ranked[:most]
        # Quick plans may have missed what the selection could do.
        open_ones = [s for s in ranked[most:] if self.may_win(s)]
        least = sorted(open_ones, key=lambda s: (self.key(s), s))
        return [*chosen, *least[:most]]

    def plan(self, selection: Selection, strategies: Sequence[Strategy]) -> None:
        """Plan on a selection; the best plans go to the board of the whole cluster."""
        part = Scoreboard(restricted(self.problem, self.pools, selection))
        for strategy in strategies:
            strategy.search(part)
        best = part.wanted
        refined = part.refined[:NUM_TAKEN]
        plain = part.ranking[:NUM_TAKEN]
        if best is not None and not best.has_counts:
            # That of stock Megatron may not be among the first.
            refined += () if is_plain(best.placement) else (best,)
            plain += (best,) if is_plain(best.placement) else ()
        for candidate in refined:
            self.board.keep_refined(
                candidate.placement, candidate.cost, candidate.strategy, candidate.rank_order
            )
        # Plain placements are scored anew, so that the board ranks them by itself.
        for candidate in plain:
            self.board.score(candidate.placement, candidate.strategy)
        for candidate in part.ranking_with_counts[:NUM_TAKEN]:
            if candidate.has_counts:
                self.board.keep_counts(candidate.placement, candidate.cost, candidate.strategy)
        self.found[selection] = None if best is None else best.coarse_key
