"""A search over structures beside another one: never slower than without.

It has a board of its own, so that what was found before stays as it is, and goes on from structures
that come near the best of the other board.  Only its own best joins that board.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from megatron_hetero.model.training import TokenDispatcher
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.evaluate.rungs import Rungs
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.loop import PART, Loop, SearchLimits
from megatron_hetero.planner.units import Structure, chains_of

MAX_GRIDS = 64
"""Grids of equal replicas that such a search starts from."""


class Beside:
    """One search beside that of a whole board.

    Args:
        whole: the board of the search before.
        shards, dealt_by: as of `Completer`.
        part: of the work of a whole search.
    """

    def __init__(
        self,
        whole: Scoreboard,
        *,
        shards: bool = False,
        dealt_by: TokenDispatcher | None = None,
        part: float = 1.0,
    ) -> None:
        self.whole = whole
        self.board = Scoreboard(whole.problem)
        self.board.with_queues = whole.with_queues
        self.rungs = Rungs(self.board, shards=shards, dealt_by=dealt_by)
        self.loop = Loop(self.rungs, SearchLimits(), whole, part)
        self.rungs.best_s = self.loop.known_s

    def best(self, sources: Iterable[Iterable[Structure]]) -> Candidate | None:
        """Go on from structures, each once, and return the best with queues on shared paths; None
        where nothing fits."""
        self.loop.go_on_from(self._each_once(sources), self.loop.limits.slack)
        self.whole.num_priced += self.board.num_priced
        return Rescorer(self.board).best()

    def of_board(self) -> Iterator[Structure]:
        """Yield the structures of the whole board, those that lack memory last."""
        for one in (*self.whole.ranking_of_all, *self.whole.out_of_memory.fastest):
            yield tuple(chains_of(one.placement))

    def has_work(self, part: int) -> bool:
        """Return whether less than one part in so many of the work for starts is done."""
        return self.rungs.done <= self.loop.own_work // PART // part

    def _each_once(self, sources: Iterable[Iterable[Structure]]) -> Iterator[Structure]:
        known: set[Hashable] = set()
        for structures in sources:
            for structure in structures:
                # Half of the part of the work that these structures may take.
                if not self.has_work(2):
                    return
                if (key := self.rungs.image(structure)) not in known:
                    known.add(key)
                    yield structure
