"""Progress of a verification in words, with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from megatron_hetero.runtime.job.local.jobs import LocalJob, log_of


@dataclass
class TimeLeft:
    """Seconds of the plan's runs, which take nearly all of a verification's time.

    `say` gets the words, `runs_left` is the number of the plan's runs that are to begin, `clock`
    gives seconds.
    """

    say: Callable[[str], None]
    runs_left: int
    clock: Callable[[], float] = time.monotonic
    _longest_s: float = field(default=0.0, init=False)

    def watch(self, job: LocalJob, num_steps: int, *, of_plan: bool) -> Callable[[], None]:
        """Begin a run; return what is to be called often while it lasts.

        Args:
            job: the run, whose last rank prints Megatron's log.
            num_steps: its optimizer steps.
            of_plan: whether it is one of the plan's runs.
        """
        began, ends = self.clock(), list[float]()
        self.runs_left -= of_plan

        def look() -> None:
            done = log_of(job, job.num_ranks - 1).count("elapsed time per iteration")
            passed = self.clock() - began
            ends.extend([passed] * (done - len(ends)))
            at = f"step {done + 1} of {num_steps}" if done < num_steps else "ending"
            left = self._left_s(passed, ends, num_steps) if of_plan else None
            words = "" if left is None else f", about {_rounded(left)} left"
            self.say(f"{job.name}: {at}{words}")

        return look

    def _left_s(self, passed: float, ends: list[float], num_steps: int) -> float | None:
        """Return the seconds to the end of the plan's last run; None if nothing tells yet.

        Args:
            passed: seconds since the run began.
            ends: seconds from the begin of the run to the end of each step so far.
            num_steps: its steps.
        """
        # Two ends of steps tell the pace, the first one with the start of the processes.
        whole = self._longest_s
        if len(ends) > 1:
            step_s = (ends[-1] - ends[0]) / (len(ends) - 1)
            whole = max(ends[0] + (num_steps - 1) * step_s, passed)
            self._longest_s = max(self._longest_s, whole)
        if whole == 0:
            return None
        return max(whole - passed, 0) + self.runs_left * self._longest_s


def _rounded(seconds: float) -> str:
    """Write an estimate, which no fraction of a second becomes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
