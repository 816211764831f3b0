"""Simulation of one pipeline by itself, given seconds for computations and hops.

Sends do not hold up the sender's computation.  Each direction of a boundary carries one message at
a time for its `serialisation_s`; the message is usable `latency_s` later.
`schedule.simulator.step` puts a whole plan on its cluster, where replicas share links.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.schedule.parts import (
    ChunkTimes,
    Collective,
    Crossing,
    OpSpan,
    Pipeline,
    Run,
)
from megatron_hetero.schedule.programme import COMPUTE, Schedule
from megatron_hetero.schedule.simulator.engine import run_step

StageTimes = PassTimes | Sequence[ChunkTimes]
"""Times of a stage with one chunk, or of each chunk of a stage."""


@dataclass(frozen=True)
class Simulation:
    """`makespan_s` ends with the last stage's last operation; `peak_in_flight` counts micro-batches
    (of any chunk) between forward and the end of backward.  It and `busy_s` are [stage]."""

    makespan_s: float
    busy_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    run: Run

    @property
    def bubble(self) -> float:
        """Return the share of all stages' time that is not computation, 0..1."""
        total_s = self.makespan_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / total_s if total_s else 0.0


def simulate(
    schedule: Schedule,
    stages: Sequence[StageTimes],
    forward_hops: Sequence[BoundaryTime],
    backward_hops: Sequence[BoundaryTime],
) -> Simulation:
    """Run every programme as early as its messages allow.

    Args:
        stages: seconds of one micro-batch, shape [stage], or [stage][chunk].
        forward_hops, backward_hops: shape [boundary of the chain]; with one chunk on each stage
            hop i joins stages i and i + 1.
    Raises:
        CheckFailedError: some stage waits for a message that never comes.
    """
    # Every hop has a path of its own: nothing queues.
    crossings = [
        tuple(
            Crossing(((f"{direction} {boundary}", hop.serialisation_s),), hop.latency_s)
            for boundary, hop in enumerate(hops)
        )
        for direction, hops in (("forward", forward_hops), ("backward", backward_hops))
    ]
    times = tuple(chunk_times(stage) for stage in stages)
    pipeline = Pipeline(schedule, times, crossings[0], crossings[1])
    # Exchange and update, with which the programmes may end, take no time here.
    numbers = range(schedule.num_stages)
    sync = Collective("gradients", tuple((0, stage) for stage in numbers), (("gradients", 0.0),))
    has_sync = any(i[0].kind == "gradient_sync" for p in schedule.programmes for i in p)
    run = run_step([pipeline], [sync] if has_sync else [], [[0.0] * len(times)])
    spans = [run.operations[0, stage] for stage in numbers]
    # Times and peaks from what every stage did.
    return Simulation(
        run.end_s,
        tuple(computing_s(s) for s in spans),
        tuple(peak_in_flight(s) for s in spans),
        run,
    )


def chunk_times(times: StageTimes) -> tuple[ChunkTimes, ...]:
    """Return the times of each chunk of a stage."""
    # A stage as a whole is one chunk, whose backward pass is in one piece.
    if isinstance(times, PassTimes):
        return (ChunkTimes(times.forward_s, times.backward_s),)
    return tuple(times)


def computing_s(spans: Sequence[OpSpan]) -> float:
    """Sum the seconds that a stage computes, without gradient exchange and optimizer."""
    return sum(span.end_s - span.start_s for span in spans if span.kind in COMPUTE)


def peak_in_flight(spans: Sequence[OpSpan]) -> int:
    """Count the most micro-batches (of any chunk) under way between a forward and the end of its
    backward."""
    # In the order of the stage's spans; with split backward passes the second part lets go.
    now = most = 0
    for span in spans:
        if span.kind == "forward":
            now += 1
            most = max(most, now)
        elif span.kind in ("backward", "backward_weight"):
            now -= 1
    return most
