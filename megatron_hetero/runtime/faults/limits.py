"""How long a training thread may stay in a phase before its rank counts as standing still."""

from __future__ import annotations

from megatron_hetero.runtime.faults.progress import Phase, Stamp

PERIOD_S = 1.0
"""Between two publications of a rank."""
LOST_S = 4.0
"""Seconds of silence after which a training machine counts as gone."""
DEFAULT_STALL_S = 40.0
# Seconds without a publication, in a phase that announces no pause.
_FROZEN_S = 30.0
# Seconds in an announced phase: of the training thread, and without a publication.
_ANNOUNCED_S = 1800.0
_ANNOUNCED_SILENCE_S = 600.0
CONNECT_S = 60.0
"""Seconds for making a communicator and the connections of it, at the start."""
_SAFETY = 5.0
_ANNOUNCED = frozenset(
    (
        Phase.START,
        Phase.GROUPS,
        Phase.SETUP,
        Phase.SAVE,
        Phase.SAVE_DATA,
        Phase.MANIFEST,
        Phase.RENAME,
        Phase.TRACKER,
        Phase.DELETE_OLD,
        Phase.PAUSE,
        Phase.END,
    )
)


class StallLimits:
    """The limits of one rank: a floor, and five times the longest stay that ended well.

    Phases that announce a pause (set-up, saves, `PROGRESS.pause`) have the half hour that Megatron
    has for its collectives.  So does the first step of a process, in which kernels are compiled;
    the stays of that step teach nothing.  Before it each communicator has a minute.

    Args:
        floor_s: seconds that any phase may last.
    """

    def __init__(self, floor_s: float = DEFAULT_STALL_S) -> None:
        self.floor_s = floor_s
        self._longest: dict[Phase, float] = {}
        self._last: Stamp | None = None
        self._first_step: int | None = None

    def learn(self, stamp: Stamp) -> None:
        """Note a stamp; the stamp ends the stay in the phase before."""
        last, self._last = self._last, stamp
        if stamp.phase is Phase.WARM_UP and self._first_step is None:
            self._first_step = stamp.step
        if last is not None and not self._is_first(last.step):
            stay = stamp.time_s - last.time_s
            if stay > self._longest.get(last.phase, 0.0):
                self._longest[last.phase] = stay

    def of(self, phase: Phase, step: int) -> float:
        """Seconds that a training thread may stay in `phase` of `step`."""
        if phase is Phase.CONNECT:
            return max(self.floor_s, CONNECT_S)
        if self.is_announced(phase) or self._is_first(step):
            return _ANNOUNCED_S
        return max(self.floor_s, _SAFETY * self._longest.get(phase, 0.0))

    def silence_of(self, phase: Phase) -> float:
        """Return the seconds for which a process may publish nothing with the training thread in
        `phase`.

        Building an index of data, or describing a checkpoint, may hold the interpreter for long.
        """
        return _ANNOUNCED_SILENCE_S if self.is_announced(phase) else _FROZEN_S

    def is_announced(self, phase: Phase) -> bool:
        """Return whether nobody knows the length of a phase."""
        return phase in _ANNOUNCED

    def _is_first(self, step: int) -> bool:
        return self._first_step is None or step <= self._first_step
