"""The events of one optimizer step: every rank's programme run as early as messages allow.

Any number of pipelines share named paths.  A path carries one message at a time, first come first
served; each direction is a path of its own.  A message takes all its paths for `serialisation_s`
and is usable `latency_s` later.  Collectives take their paths likewise, and begin when the last of
their holders has come to them.

Stages run ahead on their own until they send; sends and collectives are taken in order of time, so
that paths are granted as they would be.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.programme import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Instruction,
    Operation,
    OperationKind,
    Schedule,
)

SendMode = Literal["buffered", "waited"]
"""What a sender does after a send: goes on, as our runtime does, or waits until the message has
arrived and its receiver has asked for it, as stock Megatron does."""

StageId = tuple[int, int]
"""(pipeline, stage)."""


@dataclass(frozen=True)
class ChunkTimes:
    """Seconds of one micro-batch on one model chunk of a stage.

    `backward_weight_s` is the part of the backward pass that makes weight gradients; it is a pass
    of its own in zero-bubble schedules.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float = 0.0

    def slower(self, factor: float) -> ChunkTimes:
        """The same, `factor` times as long."""
        return ChunkTimes(
            factor * self.forward_s,
            factor * self.backward_input_s,
            factor * self.backward_weight_s,
        )

    def seconds(self, kind: OperationKind) -> float:
        """Duration of one computation."""
        match kind:
            case "forward":
                return self.forward_s
            case "backward":
                return self.backward_input_s + self.backward_weight_s
            case "backward_input":
                return self.backward_input_s
            case "backward_weight":
                return self.backward_weight_s
        raise ValueError(f"{kind} is no computation")


@dataclass(frozen=True)
class Crossing:
    """One message over a boundary in one direction."""

    paths: tuple[str, ...]
    serialisation_s: float
    latency_s: float
    num_bytes: float = 0.0


@dataclass(frozen=True)
class Pipeline:
    """One replica.  `times` is [stage][chunk]; crossings are [boundary of the schedule's chain]."""

    schedule: Schedule
    times: tuple[tuple[ChunkTimes, ...], ...]
    forward: tuple[Crossing, ...]
    backward: tuple[Crossing, ...]
    sends: SendMode = "buffered"


@dataclass(frozen=True)
class Collective:
    """What all holders do together after their pipelines.

    A holder comes to all its collectives at once, when its pipeline is done, or, if they are
    `in_turn`, to each when the one before it is done.  Each of `hops` is (path, seconds for which
    it is taken); the holders go on when the last hop is done and `latency_s` has passed.
    """

    name: str
    holders: tuple[StageId, ...]
    hops: tuple[tuple[str, float], ...]
    latency_s: float = 0.0
    num_bytes: float = 0.0
    in_turn: bool = False


class OpSpan(NamedTuple):
    """A computation of a stage, or its part of a collective (`gradient_sync`), or its `step`."""

    kind: OperationKind
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


class MessageSpan(NamedTuple):
    """A message: posted, on its paths from `start_s` to `end_s`, usable at `arrival_s`."""

    pipeline: int
    sender: int
    receiver: int
    operation: Operation
    posted_s: float
    start_s: float
    end_s: float
    arrival_s: float


@dataclass
class Run:
    """What happened.  Lists by (pipeline, stage) in the order of the pipelines given."""

    end_s: float = 0.0
    operations: dict[StageId, list[OpSpan]] = field(default_factory=dict)
    messages: list[MessageSpan] = field(default_factory=list)
    collectives: list[tuple[Collective, float, float]] = field(default_factory=list)
    path_busy_s: dict[str, float] = field(default_factory=dict)


def run_step(
    pipelines: Sequence[Pipeline],
    collectives: Sequence[Collective] = (),
    update_s: Sequence[Sequence[float]] | None = None,
) -> Run:
    """Simulate one step.

    Args:
        collectives: the gradient exchange, at the programmes' `gradient_sync`.
        update_s: seconds of the optimizer on each stage, [pipeline][stage]; all stages begin it
            together, because the gradient norm is one for all.
    Raises:
        CheckFailedError: some stage waits for a message that never comes.
    """
    return _Engine(pipelines, collectives).run(update_s)


class _Send(NamedTuple):
    """A message to be posted; `key` names it on both sides."""

    key: int
    operation: Operation
    receiver: int
    crossing: Crossing


@dataclass(slots=True)
class _Instruction:
    """An instruction, compiled: what it computes, what it sends, what it waits for."""

    source: Instruction
    compute: tuple[OperationKind, int, int, float] | None = None
    sends: tuple[_Send, ...] = ()
    receives: tuple[int, ...] = ()


class _Stage:
    """Where one stage has come to."""

    __slots__ = (
        "collectives",
        "id",
        "instructions",
        "is_blocked",
        "now_s",
        "operations",
        "posted",
        "sends_wait",
        "sent_until_s",
    )

    def __init__(self, identity: StageId, sends_wait: bool) -> None:
        self.id = identity
        self.sends_wait = sends_wait
        self.instructions: list[_Instruction] = []
        self.collectives: list[int] = []
        self.operations: list[OpSpan] = []
        self.now_s = 0.0
        self.posted = False
        """The sends of the current instruction have been posted."""
        self.sent_until_s = 0.0
        """When all that was sent has arrived; gradients are exchanged after that."""
        self.is_blocked = False
        """It waits for something that nobody has posted yet."""


class _Engine:
    def __init__(self, pipelines: Sequence[Pipeline], collectives: Sequence[Collective]) -> None:
        self.collectives = collectives
        self.run_ = Run()
        self.stages: dict[StageId, _Stage] = {}
        self.free_s: defaultdict[str, float] = defaultdict(float)
        self.busy_s: defaultdict[str, float] = defaultdict(float)
        self.arrival_s: dict[tuple[int, int], float] = {}
        self.asked_s: dict[tuple[int, int], float] = {}
        """When a receiver came to a message; what a waiting sender has to know."""
        self.waiting: dict[tuple[int, int], _Stage] = {}
        self.asking: dict[tuple[int, int], _Stage] = {}
        self.present: defaultdict[int, list[float]] = defaultdict(list)
        self.queue: list[tuple[float, int, _Stage | None, int]] = []
        self.num_queued = 0
        self.ready: list[_Stage] = []
        for index, pipeline in enumerate(pipelines):
            for stage in range(pipeline.schedule.num_stages):
                made = _Stage((index, stage), pipeline.sends == "waited")
                made.instructions = list(reversed(_compile(pipeline, stage)))
                self.stages[made.id] = made
                self.run_.operations[made.id] = made.operations
        for number, collective in enumerate(collectives):
            for holder in collective.holders:
                self.stages[holder].collectives.append(number)

    def run(self, update_s: Sequence[Sequence[float]] | None) -> Run:
        """Until nothing can move any more."""
        for stage in self.stages.values():
            self._advance(stage)
        while self.queue:
            time_s, _, posting, collective = heappop(self.queue)
            if posting is not None:
                self._post(posting, time_s)
                self._advance(posting)
            else:
                self._reduce(collective, time_s)
            while self.ready:
                self._advance(self.ready.pop())
        for stage in self.stages.values():
            if stage.instructions:
                at = " + ".join(str(operation) for operation in stage.instructions[-1].source)
                raise CheckFailedError(f"stage {stage.id[1]} waits for ever at {at}")
        self._update(update_s)
        self.run_.path_busy_s = dict(self.busy_s)
        self.run_.end_s = max((stage.now_s for stage in self.stages.values()), default=0.0)
        return self.run_

    def _advance(self, stage: _Stage) -> None:
        """Go on until a message is missing, or something must be taken in order of time."""
        instructions = stage.instructions
        pipeline = stage.id[0]
        while instructions:
            instruction = instructions[-1]
            if instruction.sends and not stage.posted:
                self._queue(stage.now_s, stage, -1)
                return
            if instruction.compute is not None:
                kind, micro_batch, chunk, seconds = instruction.compute
                start_s = stage.now_s
                stage.now_s = end_s = start_s + seconds
                stage.operations.append(OpSpan(kind, micro_batch, chunk, start_s, end_s))
            else:
                end = self._end_of_messages(stage, pipeline, instruction)
                if end is None:
                    stage.is_blocked = True
                    return
                stage.now_s = end
            stage.posted = False
            instructions.pop()
        stage.now_s = max(stage.now_s, stage.sent_until_s)
        if stage.collectives:
            self._come(stage)

    def _end_of_messages(
        self, stage: _Stage, pipeline: int, instruction: _Instruction
    ) -> float | None:
        """When all messages of an instruction are done; None while one is not on its way."""
        end_s = now_s = stage.now_s
        missing = False
        for message in instruction.receives:
            key = (pipeline, message)
            if key not in self.asked_s:
                self.asked_s[key] = now_s
                self._wake(self.asking.pop(key, None))
            arrival_s = self.arrival_s.get(key)
            if arrival_s is None:
                self.waiting[key] = stage
                missing = True
            elif arrival_s > end_s:
                end_s = arrival_s
        if stage.sends_wait:
            for send in instruction.sends:
                key = (pipeline, send.key)
                asked_s = self.asked_s.get(key)
                if asked_s is None:
                    self.asking[key] = stage
                    missing = True
                else:
                    end_s = max(end_s, self.arrival_s[key], asked_s)
        return None if missing else end_s

    def _post(self, stage: _Stage, now_s: float) -> None:
        stage.posted = True
        pipeline, number = stage.id
        for send in stage.instructions[-1].sends:
            start_s, end_s = self._take(
                [(path, send.crossing.serialisation_s) for path in send.crossing.paths], now_s
            )
            arrival_s = end_s + send.crossing.latency_s
            key = (pipeline, send.key)
            self.arrival_s[key] = arrival_s
            stage.sent_until_s = max(stage.sent_until_s, arrival_s)
            self.run_.messages.append(
                MessageSpan(
                    pipeline,
                    number,
                    send.receiver,
                    send.operation,
                    now_s,
                    start_s,
                    end_s,
                    arrival_s,
                )
            )
            self._wake(self.waiting.pop(key, None))

    def _take(self, hops: Sequence[tuple[str, float]], now_s: float) -> tuple[float, float]:
        """Take paths, each for its seconds, once all are free; (start, end of the longest)."""
        start_s = max([now_s, *(self.free_s[path] for path, _ in hops)])
        end_s = start_s
        for path, seconds in hops:
            self.free_s[path] = start_s + seconds
            self.busy_s[path] += seconds
            end_s = max(end_s, start_s + seconds)
        return start_s, end_s

    def _come(self, stage: _Stage) -> None:
        """A stage comes to its collectives; the last holder of each starts it."""
        here = stage.collectives
        if self.collectives[here[0]].in_turn:
            here = here[:1]
        for number in here:
            present = self.present[number]
            present.append(stage.now_s)
            if len(present) == len(self.collectives[number].holders):
                self._queue(max(present), None, number)

    def _reduce(self, number: int, now_s: float) -> None:
        collective = self.collectives[number]
        _, end_s = self._take(collective.hops, now_s)
        end_s += collective.latency_s
        self.run_.collectives.append((collective, now_s, end_s))
        for holder in collective.holders:
            stage = self.stages[holder]
            stage.collectives.remove(number)
            stage.operations.append(OpSpan("gradient_sync", -1, 0, now_s, end_s))
            stage.now_s = max(stage.now_s, end_s)
            if collective.in_turn and stage.collectives:
                self._come(stage)

    def _update(self, update_s: Sequence[Sequence[float]] | None) -> None:
        if update_s is None:
            return
        start_s = max(stage.now_s for stage in self.stages.values())
        for (pipeline, number), stage in self.stages.items():
            stage.now_s = start_s + update_s[pipeline][number]
            stage.operations.append(OpSpan("step", -1, 0, start_s, stage.now_s))

    def _queue(self, time_s: float, stage: _Stage | None, collective: int) -> None:
        # The number keeps equal times in the order in which they came up.
        self.num_queued += 1
        heappush(self.queue, (time_s, self.num_queued, stage, collective))

    def _wake(self, stage: _Stage | None) -> None:
        """Something that a stage waits for is known now."""
        if stage is not None and stage.is_blocked:
            stage.is_blocked = False
            self.ready.append(stage)


def _compile(pipeline: Pipeline, stage: int) -> list[_Instruction]:
    """The programme of a stage up to its gradient exchange, in the engine's terms."""
    schedule = pipeline.schedule
    num_micro_batches = schedule.num_micro_batches
    places = [schedule.virtual_stage(stage, c) for c in range(schedule.num_chunks(stage))]
    chain = schedule.chain
    compiled = []
    for instruction in schedule.programmes[stage]:
        kind = instruction[0].kind
        if kind in ("gradient_sync", "step"):
            break
        if kind in COMPUTE and len(instruction) == 1:
            work = instruction[0]
            seconds = pipeline.times[stage][work.chunk].seconds(kind)
            compiled.append(
                _Instruction(instruction, compute=(kind, work.micro_batch, work.chunk, seconds))
            )
            continue
        sends, receives = [], []
        for operation in instruction:
            is_forward = operation.kind.endswith("forward")
            is_send = operation.kind in SENDS
            if not is_send and operation.kind not in RECEIVES:
                raise CheckFailedError(
                    f"stage {stage} posts {operation.kind} together with messages; a computation "
                    "is an instruction of its own"
                )
            place = places[operation.chunk]
            boundary = place if is_send == is_forward else place - 1
            key = (2 * boundary + is_forward) * num_micro_batches + operation.micro_batch
            if is_send:
                crossing = (pipeline.forward if is_forward else pipeline.backward)[boundary]
                receiver = chain[boundary + 1 if is_forward else boundary]
                sends.append(_Send(key, operation, receiver, crossing))
            else:
                receives.append(key)
        compiled.append(_Instruction(instruction, None, tuple(sends), tuple(receives)))
    return compiled
