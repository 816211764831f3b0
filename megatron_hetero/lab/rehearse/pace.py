"""Pace of a rehearsal on one rank: its steps, the time scale, and the steps that count.

The first steps run as fast as this machine can; from their times the ranks agree on one time scale.
A step in which this machine fell behind does not count, and is repeated more slowly.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from megatron_hetero.lab.rehearse.clock import now, sleep_until
from megatron_hetero.lab.rehearse.links.transport import Transport
from megatron_hetero.lab.rehearse.progress import StepProgress
from megatron_hetero.schedule.exchange.early import LastBackward
from megatron_hetero.schedule.parts import ChunkTimes

WARMUP_STEPS = 2
SLACK = 3.0
"""Least length of the stretched step, in multiples of this machine's time for its arithmetic."""
MOST_TRIES = 4
"""Most steps run for each wanted step, if this machine disturbs steps."""
MOST_LATE = 0.02
"""Most of a step that this machine may lose on any rank, if the step is to count."""
_STRETCH_ON = 1.5
"""Factor by which the time scale grows after a disturbed step."""
_LEAST_ALLOWANCE_S = 0.2
_BEGIN_IN_S = 0.01


@dataclass(frozen=True)
class RankTimes:
    """Times of one rank's GPU, in the cluster's seconds: passes of chunks, and optimizer."""

    chunks: tuple[ChunkTimes, ...]
    update_s: float
    num_micro_batches: int
    last_backward: LastBackward | None = None

    @property
    def busy_s(self) -> float:
        """Return the seconds of all computations of one step."""
        passes_s = sum(c.seconds("forward") + c.seconds("backward") for c in self.chunks)
        return self.num_micro_batches * passes_s

    @property
    def shortest_s(self) -> float:
        """Return the seconds of the shortest pass."""
        return min(min(c.seconds("forward"), c.seconds("backward")) for c in self.chunks)


class StepTimes(Protocol):
    """What the choice of a time scale has to know of a rank's step."""

    @property
    def busy_s(self) -> float:
        """Return the seconds of all computations of one step."""

    @property
    def shortest_s(self) -> float:
        """Return the seconds of the shortest pass."""


class RehearsalDone(SystemExit):
    """Exit from training, in good order: all ranks have seen enough steps.

    The runtime takes it as it takes Megatron's own early exits: a rank that leaves so says to the
    watches of the others that its end is no fault.
    """


class StepPace:
    """Steps of one rank: their common begin, their time scale, and their records."""

    def __init__(
        self,
        transport: Transport,
        times: StepTimes,
        num_steps: int,
        time_scale: float | None,
        progress: StepProgress | None = None,
    ) -> None:
        """Prepare the records.

        Args:
            transport: the rank's hooks on messages, with its clock.
            times: seconds of its passes on the cluster.
            num_steps: number of steps that are to count.
            time_scale: fixed time scale; None lets the ranks agree on one.
            progress: progress to write, on one rank only.
        """
        self._transport, self._clock = transport, transport.clock
        self._times = times
        self._num_steps, self._time_scale = num_steps, time_scale
        self._progress = progress
        self.num_begun = 0
        """Steps so far, the present one included."""
        self.records: list[dict[str, Any]] = []
        self._begun_s = 0.0
        self._free_step_s = 0.0

    def begin(self) -> None:
        """Start a step on all ranks at once.

        Raises:
            RehearsalDone: all ranks have seen enough steps.
        """
        # Free steps come first; their times choose the scale, and each later step is judged
        # when the next one begins.
        if self.num_begun == WARMUP_STEPS:
            self._agree_on_scale()
        elif self.num_begun > WARMUP_STEPS:
            self._judge_last_step()
        self.num_begun += 1
        if self._progress is not None:
            self._progress.begin(self.num_begun, self._num_kept, self._clock.scale)
        # A moment that no rank has passed: the slowest rank's present, and a little more.
        begin_s = self._latest(now()) + _BEGIN_IN_S
        self._transport.sent, self._transport.collectives = [], []
        self._transport.line_s = defaultdict(float)
        self._clock.begin_step(begin_s)
        sleep_until(begin_s)
        self._begun_s = now()

    def end(self, **noted: Any) -> None:
        """Record a step at the end, with further notes."""
        clock = self._clock
        self._free_step_s = now() - self._begun_s
        # Free steps are no result.
        if clock.scale == 0:
            return
        length_s = clock.until_s - clock.step_begin_s
        # How far this machine is behind the rank's own time at the end.
        late_s = now() - clock.until_s
        self.records.append(
            {
                "scale": clock.scale,
                "is_disturbed": clock.lost_s + late_s > MOST_LATE * length_s,
                "end_s": length_s + late_s,
                "spans": [list(span) for span in clock.spans],
                "sent": [list(message) for message in self._transport.sent],
                "collectives": self._transport.collectives,
                "line_s": self._transport.line_s,
                "largest_lag_s": clock.largest_lag_s,
                "host_s": sum(clock.host_s),
                **noted,
            }
        )

    def _judge_last_step(self) -> None:
        """Keep a step in which this machine kept pace on all ranks; else try again, more slowly."""
        # Disturbed on one rank is disturbed on all.
        is_disturbed = bool(self._latest(float(self.records[-1]["is_disturbed"])))
        self.records[-1]["is_disturbed"] = is_disturbed
        if self._num_kept == self._num_steps:
            raise RehearsalDone
        # More time for each pass, unless the user has fixed the scale.
        if is_disturbed and self._time_scale is None:
            self._set_scale(_STRETCH_ON * self._clock.scale)

    @property
    def _num_kept(self) -> int:
        return sum(not record["is_disturbed"] for record in self.records)

    def _agree_on_scale(self) -> None:
        """Choose the time scale from the last free step, so slow that most of the time is sleep.

        All ranks together took `_free_step_s`; and no pass may become shorter than this machine
        needs for it when undisturbed.
        """
        times = self._times
        passes_s = sorted(self._clock.host_s)
        # The median pass of the last free step, in this machine's seconds.
        typical_s = passes_s[len(passes_s) // 2]
        own = max(SLACK * self._free_step_s / times.busy_s, 2 * typical_s / times.shortest_s)
        self._set_scale(self._time_scale or self._latest(own))

    def _set_scale(self, scale: float) -> None:
        self._clock.scale = scale
        self._clock.allowance_s = max(_LEAST_ALLOWANCE_S, self._times.shortest_s * scale)

    def _latest(self, value: float) -> float:
        tensor = torch.tensor([value], dtype=torch.float64)
        # This agreement is the rehearsal's own and no message of the job.
        with self._transport.left_alone():
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return float(tensor.item())

    def save(self, path: Path) -> None:
        """Write the records of the steps, for the parent."""
        path.write_text(json.dumps(self.records))


def read_records(path: Path) -> list[Mapping[str, Any]]:
    """Read the file that `StepPace.save` wrote."""
    records: list[Mapping[str, Any]] = json.loads(path.read_text())
    return records
