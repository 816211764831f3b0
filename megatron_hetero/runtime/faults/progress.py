"""Where the training thread of this process is: its step and its phase, stamped as it goes.

Stamps are made by the training thread itself and by nothing else, so a stamp that grows old says
that training does not go on, however lively other threads of the process are.  A stamp costs two
assignments and a reading of the clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


class Phase(StrEnum):
    """Phases of a rank, in the order of a job."""

    START = "start"
    GROUPS = "groups"
    CONNECT = "connect"
    SETUP = "setup"
    WARM_UP = "warm-up"
    STEADY = "steady"
    COOL_DOWN = "cool-down"
    GRADIENT_SYNC = "gradient-sync"
    OPTIMIZER_STEP = "optimizer-step"
    BETWEEN_STEPS = "between-steps"
    SAVE = "save"
    SAVE_DATA = "save-data"
    MANIFEST = "manifest"
    RENAME = "rename"
    TRACKER = "tracker"
    DELETE_OLD = "delete-old"
    VALIDATION = "validation"
    PAUSE = "pause"
    END = "end"


OF_RANK_0 = frozenset({Phase.MANIFEST, Phase.RENAME, Phase.TRACKER, Phase.DELETE_OLD})
"""Phases of a save that rank 0 goes through for all."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The training thread entered `phase` of `step` at `time_s` of the monotonic clock."""

    step: int
    phase: Phase
    time_s: float


Listener = Callable[[Stamp], None]


class PhaseStamps:
    """The stamps of one process; `current` is the newest."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []
        self.current = Stamp(0, Phase.START, time.monotonic())

    def enter(self, phase: Phase) -> None:
        """Stamp `phase` of the step under way."""
        self._stamp(self.current.step, phase)

    def begin_step(self, step: int, phase: Phase) -> None:
        """Stamp `phase` of another step; steps are counted as Megatron's log counts them."""
        self._stamp(step, phase)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Announce a rest of training, so that the rank does not count as frozen."""
        before = self.current.phase
        self.enter(Phase.PAUSE)
        try:
            yield
        finally:
            self.enter(before)

    def listen(self, listener: Listener) -> None:
        """Call `listener` with every stamp from now on, on the training thread."""
        self._listeners.append(listener)

    def _stamp(self, step: int, phase: Phase) -> None:
        self.current = Stamp(step, phase, time.monotonic())
        for listener in self._listeners:
            listener(self.current)


PROGRESS = PhaseStamps()
"""The progress of this process."""
