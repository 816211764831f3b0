"""All-reduces of two ranks, begun in one order on both."""

from __future__ import annotations

from threading import Event

import torch
from torch.distributed import ProcessGroup, all_reduce


class Turn:
    """A place in the order of a pair's all-reduces.

    Args:
        before: set once the one before it has begun, or never will.
    """

    def __init__(self, before: Event | None) -> None:
        self._before = before
        self.is_over = Event()

    def sum(self, part: torch.Tensor, group: ProcessGroup) -> None:
        """Sum a tensor over the pair, in place, when the turn has come."""
        if self._before is not None:
            self._before.wait()
        # A library needs the order of beginnings alone, so the next one does not wait for this sum.
        work = all_reduce(part, group=group, async_op=True)
        self.end()
        work.wait()

    def end(self) -> None:
        """Let the next one begin; an exchange that fails before its sum calls it too."""
        self._before = None
        self.is_over.set()


class PairGroup:
    """A communicator of two ranks.

    A library tells collectives of a communicator apart by their order alone, and the exchanges that
    use this one run in several threads.  So each takes its turn when it starts, one order on both
    ranks, and begins its sum after those before it.  The first exchange that is not done waits for
    nobody's turn, and its rounds are under way on all of its holders; so all come to their end.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self._last: Event | None = None

    def next_turn(self) -> Turn:
        """Take the next turn."""
        turn = Turn(self._last)
        self._last = turn.is_over
        return turn
