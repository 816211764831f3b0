"""Progress of a rehearsal: written by its first rank, put into words by its parent."""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

from megatron_hetero.lab.rehearse.clock import now


@dataclass(frozen=True)
class State:
    """State of a rehearsal.

    `num_begun` counts all steps, `num_kept` those that count. `scale` is 0 in free steps; `since_s`
    is the time at which the present step began.
    """

    num_begun: int
    num_kept: int
    scale: float
    since_s: float


class StepProgress:
    """A few numbers in memory that parent and ranks share; make it before the fork."""

    def __init__(self) -> None:
        self._values = multiprocessing.Array("d", 4)

    def begin(self, num_begun: int, num_kept: int, scale: float) -> None:
        """Write that a step begins."""
        with self._values.get_lock():
            self._values[:] = [num_begun, num_kept, scale, now()]

    def state(self) -> State:
        """Read the last state."""
        with self._values.get_lock():
            num_begun, num_kept, scale, since_s = self._values[:]
        return State(int(num_begun), int(num_kept), scale, since_s)


def progress_words(
    state: State, num_ranks: int, num_steps: int, predicted_s: float, at_s: float
) -> str:
    """Describe the progress on one line.

    Args:
        state: the state of the rehearsal.
        num_ranks: number of its processes.
        num_steps: number of steps that are to count.
        predicted_s: predicted duration of a step, in the cluster's seconds.
        at_s: the present time, by the clock of `State.since_s`.
    """
    if state.num_begun == 0:
        return f"starting {num_ranks} processes"
    if state.scale == 0:
        return f"a free step of {num_ranks} processes, to see how slow the rehearsal has to be"
    # Steps that are still to count, less what the present step has used.
    step_s = predicted_s * state.scale
    left_s = (num_steps - state.num_kept) * step_s - (at_s - state.since_s)
    return (
        f"step {state.num_kept + 1} of {num_steps}, {state.scale:.3g} times slower than the "
        f"cluster: about {max(left_s, 0.0):.0f} s left"
    )
