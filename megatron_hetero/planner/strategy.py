"""The one interface of every search strategy."""

from __future__ import annotations

from typing import Protocol

from megatron_hetero.planner.evaluate.scoreboard import Scoreboard

SEED_WORK = 15_000
"""Stages priced by a strategy that brings structures to the search: n for a placement of n."""


class Strategy(Protocol):
    """Looks for placements and scores them on the board; what it finds, the board keeps.

    A strategy is a pure function of the board's problem and of what the board holds: no clock, no
    chance, no set order.  Its effort is limited in placements priced, never in seconds.
    """

    name: str

    def search(self, board: Scoreboard) -> None:
        """Score placements on `board`."""
        ...
