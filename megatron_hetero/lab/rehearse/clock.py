"""Time on one rank of a rehearsal: a computation takes as long as on the GPU that it stands for.

A GPU runs the work that its host has queued without a pause, as long as the host keeps ahead. So
does this clock: a computation begins when the previous one has ended and its message has arrived,
and the rank sleeps until the moment at which it is to end. Delays that Python, the operating system
and other processes add in between shorten the next sleep, up to `allowance_s` at a time; a longer
delay moves everything after it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

now = time.monotonic


class Span(NamedTuple):
    """A computation; its times are seconds since the step began."""

    kind: str
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


@dataclass
class Clock:
    """Clock of one rank.

    `scale` converts the cluster's seconds to this machine's; at 0 nothing is stretched, only
    measured.
    """

    scale: float = 0.0
    allowance_s: float = 0.0
    step_begin_s: float = 0.0
    until_s: float = 0.0
    """Time at which the last computation or wait ended."""
    spans: list[Span] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    """Real seconds of every computation."""
    largest_lag_s: float = 0.0
    lost_s: float = 0.0
    """Seconds by which this machine fell behind, in a pass, between passes or with a message, where
    more than `allowance_s`; and seconds for which a link was therefore taken out of turn."""

    def begin_step(self, at_s: float) -> None:
        """Start a step; all ranks pass the same `at_s`."""
        self.step_begin_s = self.until_s = at_s
        self.spans, self.host_s = [], []
        self.largest_lag_s = 0.0
        self.lost_s = 0.0

    def time(self) -> float:
        """Return the time of the rank's last event, later if the host lags too far."""
        self.until_s = self.at(self.until_s)
        return self.until_s

    def at(self, due_s: float) -> float:
        """Return the rank's time of an event that was due at `due_s` and has happened by now."""
        lag_s = now() - due_s
        self.largest_lag_s = max(self.largest_lag_s, lag_s)
        # A short lag is made up for by the next sleep: the event counts as in time.
        if lag_s <= self.allowance_s:
            return due_s
        self.lost_s += lag_s
        return due_s + lag_s

    def reach(self, at_s: float) -> None:
        """Move the rank's time on to `at_s`, the arrival of an awaited event."""
        self.until_s = max(self.until_s, at_s)

    def computed(
        self, kind: str, micro_batch: int, chunk: int, begin_s: float, began: float, seconds: float
    ) -> None:
        """End a computation: sleep until it would end on the cluster's GPU, and record its span.

        Args:
            kind: kind of the pass.
            micro_batch: its micro-batch.
            chunk: its model chunk.
            begin_s: its begin in the rank's time.
            began: its begin in real time.
            seconds: its duration on the cluster.
        """
        # The machine's own time for the pass, from which the time scale follows.
        self.host_s.append(now() - began)
        # At scale 0 nothing is stretched, and the pass ends now.
        end_s = self.at(begin_s + seconds * self.scale) if self.scale else now()
        sleep_until(end_s)
        self.until_s = end_s
        self.spans.append(
            Span(kind, micro_batch, chunk, begin_s - self.step_begin_s, end_s - self.step_begin_s)
        )


def sleep_until(at_s: float) -> None:
    """Return at `at_s`, or at once when it is past."""
    left_s = at_s - now()
    if left_s > 0:
        time.sleep(left_s)
