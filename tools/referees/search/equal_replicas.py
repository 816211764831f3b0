"""Local search over the shape of one replica, repeated as often as the cluster has room for it.

Moves of one replica (`local`) do not lead to such plans where replicas that differ make each other
wait.
"""

from __future__ import annotations

from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from tools.referees.search.shape_layout import Shape
from tools.referees.search.shape_search import MAX_KINDS, ShapeSearch
from tools.referees.search.unlike import unlike

_MANY_GPUS = 768
"""In larger clusters a part of the work, which found plans as good in most of them."""
_PART_OF_MANY = 2


class EqualReplicas:
    """Hill climbing over shapes from the best placements so far; see the module."""

    name = "equal-replicas"
    searching = ShapeSearch

    def __init__(self, num_starts: int = 4, max_work: int = 40_000) -> None:
        self.num_starts = num_starts
        self.max_work = max_work
        """Limit in stages priced (a placement of n stages counts n), of all climbs together."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        starts = unlike(board.ranking, self.num_starts)
        search = self.searching(board, self.name)
        if len(search.kinds) > MAX_KINDS:
            return
        is_large = board.problem.num_gpus > _MANY_GPUS
        max_work = self.max_work // _PART_OF_MANY if is_large else self.max_work
        seen: set[Shape] = set()
        for candidate in starts:
            shape = search.shape_of(candidate)
            if shape not in seen:
                seen.add(shape)
                search.climb(shape, max_work // len(starts))
        if max_work:
            search.try_sandwiches(max_work // self.num_starts)
