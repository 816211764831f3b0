"""Greedy list scheduling: run the pipeline on a clock, and record what each stage did.

A stage that is free takes, of the passes whose messages have arrived, the one that its policy
prefers; where none has arrived it waits, or fills the time with weight gradients that are due.
What comes out can always run (it has run), for any chain, any times and any memory limits.  The
greedy order is that of zero-bubble schedules (Qi et al. 2024, arXiv 2401.10241, sec. 3.1), with the
times, hops and limits of every stage its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.parts import ChunkTimes
from megatron_hetero.schedule.programme import Operation, Schedule, build_schedule


@dataclass(frozen=True)
class TimedPipeline:
    """Times of a pipeline for which a schedule is made.

    `chain` as in `Schedule`; `times` is [stage][chunk]; hops are [boundary of the chain].
    """

    chain: tuple[int, ...]
    num_micro_batches: int
    times: tuple[tuple[ChunkTimes, ...], ...]
    forward_hops: tuple[BoundaryTime, ...]
    backward_hops: tuple[BoundaryTime, ...]

    @property
    def num_stages(self) -> int:
        return len(self.times)


@dataclass(frozen=True)
class Policy:
    """Rules by which a free stage chooses the next pass.

    `split`: backward passes in two parts.  `alternate`: after a backward pass a forward is
    preferred, else backward passes always are.  `patience`: weight gradients are not begun when a
    message that is on its way arrives before this share of them is done.  `group_size`: micro-
    batches of a chunk before the next chunk (interleaving; 0: as they come).
    """

    split: bool = False
    alternate: bool = True
    patience: float = 0.0
    group_size: int = 0


@dataclass(frozen=True)
class Listed:
    """A schedule and its makespan on the clock of the list scheduler."""

    schedule: Schedule
    makespan_s: float


def list_schedule(pipeline: TimedPipeline, limits: Sequence[int], policy: Policy) -> Listed:
    """Schedule every pass as early as the policy allows.

    Args:
        limits: passes that a stage may have between their forward and the end of their backward,
            shape [stage]; passes of all its chunks count.
    Raises:
        CheckFailedError: the limits are so low that all stages wait for each other.
    """
    clock = _ListClock(pipeline, limits, policy)
    clock.run()
    schedule = build_schedule(clock.orders, pipeline.num_micro_batches, pipeline.chain)
    return Listed(schedule, max(clock.free_at))


class _ListClock:
    """A pipeline under way.  Virtual stages are numbered along the chain."""

    def __init__(self, pipeline: TimedPipeline, limits: Sequence[int], policy: Policy) -> None:
        chain, m = pipeline.chain, pipeline.num_micro_batches
        self.pipeline, self.limits, self.policy = pipeline, limits, policy
        self.last = len(chain) - 1
        frame = Schedule(tuple(() for _ in pipeline.times), m, chain)
        # Virtual stage -> (stage, chunk), and stage -> its virtual stages.
        self.places = [frame.place(v) for v in range(len(chain))]
        self.on_stage = [
            [v for v, s in enumerate(chain) if s == stage] for stage in range(pipeline.num_stages)
        ]
        self.times = [pipeline.times[stage][chunk] for stage, chunk in self.places]
        # Arrival times of what has been sent and not yet used, oldest first.
        self.activations: list[deque[float]] = [deque() for _ in chain]
        self.gradients: list[deque[float]] = [deque() for _ in chain]
        self.activations[0].extend([0.0] * m)
        # By virtual stage: passes begun, which number the micro-batches.
        self.num_forwards = [0] * len(chain)
        self.num_backwards = [0] * len(chain)
        # By stage: weight gradients put off, passes under way, time of being free, last pass.
        self.weights_due: list[deque[tuple[int, int]]] = [deque() for _ in pipeline.times]
        self.in_flight = [0] * pipeline.num_stages
        self.free_at = [0.0] * pipeline.num_stages
        self.was_forward = [False] * pipeline.num_stages
        # By boundary: when the link is free again in each direction.
        self.forward_link = [0.0] * self.last
        self.backward_link = [0.0] * self.last
        self.orders: list[list[Operation]] = [[] for _ in pipeline.times]
        # Times at which a stage may have something to do; a heap.
        self.wakes: list[tuple[float, int]] = [(0.0, s) for s in range(pipeline.num_stages)]

    def run(self) -> None:
        """Go from event to event until nothing is left."""
        while self.wakes:
            # A stage that is busy at its wake has another wake when it is free.
            now, stage = heappop(self.wakes)
            if self.free_at[stage] <= now:
                self._choose(stage, now)
        done = sum(self.num_backwards)
        if done < len(self.places) * self.pipeline.num_micro_batches:
            raise CheckFailedError(
                f"no schedule keeps at most {list(self.limits)} passes under way on the stages: "
                f"all of them wait after {done} backward passes"
            )

    def _choose(self, stage: int, now: float) -> None:
        # A full stage starts no forward, and makes weight gradients to become less full.
        backward = self._first(stage, now, is_forward=False)
        is_full = self.in_flight[stage] >= self.limits[stage]
        forward = None if is_full else self._first(stage, now, is_forward=True)
        prefers_forward = self.policy.alternate and not self.was_forward[stage]
        if forward is not None and (backward is None or prefers_forward):
            self._forward(stage, forward, now)
        elif backward is not None:
            self._backward(stage, backward, now)
        elif self.weights_due[stage] and (is_full or self._has_time(stage, now)):
            self._weights(stage, now)

    def _first(self, stage: int, now: float, *, is_forward: bool) -> int | None:
        """Find a virtual stage with its next pass's input at hand, the first in turn if there are
        several."""
        inbox = self.activations if is_forward else self.gradients
        # Only passes whose input is there by now.
        found = [v for v in self.on_stage[stage] if inbox[v] and inbox[v][0] <= now]
        if len(found) < 2:
            return found[0] if found else None
        # Among several: the least advanced group, then forwards from the first chunk, backwards
        # from the last.
        done = self.num_forwards if is_forward else self.num_backwards
        size = self.policy.group_size or self.pipeline.num_micro_batches
        return min(found, key=lambda v: (done[v] // size, v if is_forward else -v))

    def _has_time(self, stage: int, now: float) -> bool:
        """Return False if a message arrives too soon to begin weight gradients."""
        # Only the oldest weight gradients may be next.
        v, _ = self.weights_due[stage][0]
        until = now + self.policy.patience * self.times[v].backward_weight_s
        coming = [
            inbox[u][0]
            for u in self.on_stage[stage]
            for inbox in (self.activations, self.gradients)
            if inbox[u]
        ]
        return not any(now < arrival < until for arrival in coming)

    def _forward(self, stage: int, v: int, now: float) -> None:
        self.activations[v].popleft()
        end = self._compute(stage, "forward", v, self.num_forwards[v], now)
        self.num_forwards[v] += 1
        self.in_flight[stage] += 1
        self.was_forward[stage] = True
        # The last virtual stage has its gradient at once: the loss.
        if v < self.last:
            hop = self.pipeline.forward_hops[v]
            self.forward_link[v] = max(end, self.forward_link[v]) + hop.serialisation_s
            self._send(self.activations, v + 1, self.forward_link[v] + hop.latency_s)
        else:
            self.gradients[v].append(end)

    def _backward(self, stage: int, v: int, now: float) -> None:
        self.gradients[v].popleft()
        k = self.num_backwards[v]
        kind = "backward_input" if self.policy.split else "backward"
        end = self._compute(stage, kind, v, k, now)
        self.num_backwards[v] += 1
        self.was_forward[stage] = False
        # Activations stay until weight gradients are done.
        if self.policy.split:
            self.weights_due[stage].append((v, k))
        else:
            self.in_flight[stage] -= 1
        if v > 0:
            hop = self.pipeline.backward_hops[v - 1]
            self.backward_link[v - 1] = max(end, self.backward_link[v - 1]) + hop.serialisation_s
            self._send(self.gradients, v - 1, self.backward_link[v - 1] + hop.latency_s)

    def _weights(self, stage: int, now: float) -> None:
        v, k = self.weights_due[stage].popleft()
        self._compute(stage, "backward_weight", v, k, now)
        self.in_flight[stage] -= 1

    def _send(self, inbox: list[deque[float]], v: int, arrival: float) -> None:
        inbox[v].append(arrival)
        heappush(self.wakes, (arrival, self.pipeline.chain[v]))

    def _compute(self, stage: int, kind: str, v: int, k: int, now: float) -> float:
        operation = Operation(kind, k, self.places[v][1])  # type: ignore[arg-type]
        end = now + self.times[v].seconds(operation.kind)
        self.orders[stage].append(operation)
        self.free_at[stage] = end
        heappush(self.wakes, (end, stage))
        return end
