"""Event simulation of a schedule: what every stage does when, given seconds for work and hops.

Sends do not hold up the sender's computation.  Each direction of a boundary carries one message at
a time for its `serialisation_s`; the message is usable `latency_s` later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_hetero.cost.compute import PassTimes
from megatron_hetero.cost.network import BoundaryTime
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.programme import Operation, OperationKind, Programme, Schedule


@dataclass(frozen=True)
class Event:
    """One operation on one stage; for a send, the time its link is busy."""

    stage: int
    operation: Operation
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """`makespan_s` ends with the last stage's last operation; `peak_in_flight` counts micro-batches
    between forward and backward.  The last three have shape [stage]."""

    makespan_s: float
    busy_s: tuple[float, ...]
    peak_in_flight: tuple[int, ...]
    events: tuple[tuple[Event, ...], ...]

    @property
    def bubble(self) -> float:
        """Share of all stages' time that is not computation, 0..1."""
        total_s = self.makespan_s * len(self.busy_s)
        return 1 - sum(self.busy_s) / total_s if total_s else 0.0


def simulate(
    schedule: Schedule,
    stages: Sequence[PassTimes],
    forward_hops: Sequence[BoundaryTime],
    backward_hops: Sequence[BoundaryTime],
    *,
    gradient_sync_s: float = 0.0,
    update_s: float = 0.0,
) -> Simulation:
    """Run every programme as early as its messages allow.

    Args:
        stages: forward and backward seconds, shape [stage].
        forward_hops, backward_hops: shape [stage - 1]; hop i joins stages i and i + 1.
        gradient_sync_s: starts on all stages once the last of them is done.
    Raises:
        CheckFailedError: some stage waits for a message that never comes.
    """
    run = _Run(schedule, stages, forward_hops, backward_hops)
    waiting = list(range(schedule.num_stages))
    while waiting:
        stage = waiting.pop()
        for neighbour in run.advance(stage):
            if neighbour not in waiting:
                waiting.append(neighbour)
    for stage, programme in enumerate(schedule.programmes):
        if run.position[stage] < _num_local(programme):
            stuck = " + ".join(str(o) for o in programme[run.position[stage]])
            raise CheckFailedError(f"stage {stage} waits for ever at {stuck}")
    compute_end_s = max(run.now_s)
    _finish(run, schedule, compute_end_s, gradient_sync_s, update_s)
    return Simulation(
        max(run.now_s),
        tuple(run.busy_s),
        tuple(run.peak_in_flight),
        tuple(tuple(events) for events in run.events),
    )


class _Run:
    """The state of a simulation under way."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[PassTimes],
        forward_hops: Sequence[BoundaryTime],
        backward_hops: Sequence[BoundaryTime],
    ) -> None:
        num_stages = schedule.num_stages
        self.schedule = schedule
        self.stages = stages
        self.hops: dict[OperationKind, Sequence[BoundaryTime]] = {
            "send_forward": forward_hops,
            "send_backward": backward_hops,
        }
        self.position = [0] * num_stages
        self.now_s = [0.0] * num_stages
        self.busy_s = [0.0] * num_stages
        self.in_flight = [0] * num_stages
        self.peak_in_flight = [0] * num_stages
        self.link_free_s: dict[tuple[int, int], float] = {}
        self.arrival_s: dict[tuple[int, int, int], float] = {}
        self.events: list[list[Event]] = [[] for _ in range(num_stages)]
        self._num_local = [_num_local(programme) for programme in schedule.programmes]

    def advance(self, stage: int) -> list[int]:
        """Run a stage until a message is missing; return the stages that it sent to."""
        sent_to = []
        programme = self.schedule.programmes[stage]
        while self.position[stage] < self._num_local[stage]:
            instruction = programme[self.position[stage]]
            started_s = self.now_s[stage]
            # Sends are posted with the receives, so they leave even when a receive must wait.
            for operation in instruction:
                if operation.kind in self.hops:
                    receiver = self._send(stage, operation, started_s)
                    if receiver is not None:
                        sent_to.append(receiver)
            ends_s = [self._end_s(stage, operation, started_s) for operation in instruction]
            if any(end_s is None for end_s in ends_s):
                break
            self.now_s[stage] = max(end_s for end_s in ends_s if end_s is not None)
            self.position[stage] += 1
        return sent_to

    def _send(self, stage: int, operation: Operation, now_s: float) -> int | None:
        """Put a message on its link; None when it was sent already."""
        forward = operation.kind == "send_forward"
        receiver = stage + 1 if forward else stage - 1
        key = (stage, receiver, operation.micro_batch)
        if key in self.arrival_s:
            return None
        hop = self.hops[operation.kind][min(stage, receiver)]
        start_s = max(now_s, self.link_free_s.get((stage, receiver), 0.0))
        end_s = start_s + hop.serialisation_s
        self.link_free_s[stage, receiver] = end_s
        self.arrival_s[key] = end_s + hop.latency_s
        self.events[stage].append(Event(stage, operation, start_s, end_s))
        return receiver

    def _end_s(self, stage: int, operation: Operation, start_s: float) -> float | None:
        """When an operation ends; None when its message is not on the way yet."""
        k = operation.micro_batch
        match operation.kind:
            case "recv_forward":
                return self._receive_s(stage, operation, stage - 1, start_s)
            case "recv_backward":
                return self._receive_s(stage, operation, stage + 1, start_s)
            case "forward":
                duration_s = self.stages[stage].forward_s
                self.in_flight[stage] += 1
                self.peak_in_flight[stage] = max(self.peak_in_flight[stage], self.in_flight[stage])
            case "backward":
                duration_s = self.stages[stage].backward_s
                self.in_flight[stage] -= 1
            case _:
                return start_s
        self.busy_s[stage] += duration_s
        self.events[stage].append(
            Event(stage, Operation(operation.kind, k), start_s, start_s + duration_s)
        )
        return start_s + duration_s

    def _receive_s(
        self, stage: int, operation: Operation, sender: int, start_s: float
    ) -> float | None:
        arrival_s = self.arrival_s.get((sender, stage, operation.micro_batch))
        return None if arrival_s is None else max(start_s, arrival_s)


def _num_local(programme: Programme) -> int:
    """Instructions before the gradient exchange, which needs every stage."""
    for index, instruction in enumerate(programme):
        if any(o.kind in ("gradient_sync", "step") for o in instruction):
            return index
    return len(programme)


def _finish(
    run: _Run, schedule: Schedule, start_s: float, gradient_sync_s: float, update_s: float
) -> None:
    """The gradient exchange (a barrier over all stages) and the optimizer update."""
    durations_s = {"gradient_sync": gradient_sync_s, "step": update_s}
    for stage, programme in enumerate(schedule.programmes):
        if run.position[stage] == len(programme):
            continue
        now_s = start_s
        for instruction in programme[run.position[stage] :]:
            for operation in instruction:
                end_s = now_s + durations_s[operation.kind]
                run.events[stage].append(Event(stage, operation, now_s, end_s))
                now_s = end_s
        run.now_s[stage] = now_s
