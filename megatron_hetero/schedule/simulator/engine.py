"""The events of one optimizer step: every rank's programme run as early as messages allow.

Any number of pipelines share named paths.  A path carries one message at a time, first come first
served; each direction is a path of its own.  A message takes each of its paths for as long as its
bytes take there, and is usable `latency_s` after the last.  Collectives take their paths likewise
(`schedule.simulator.exchange`), one after the other too.  Messages are small beside the gradients
that travel meanwhile, and libraries share a link among both: neither slows the other down here.

Stages run ahead on their own until they send; sends and collectives are taken in order of time, so
that paths are granted as they would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.parts import (
    Collective,
    MessageSpan,
    OpSpan,
    Pipeline,
    Run,
    StageId,
)
from megatron_hetero.schedule.programme import (
    OperationKind,
)
from megatron_hetero.schedule.simulator.compile import CompiledInstruction, compile_programme
from megatron_hetero.schedule.simulator.exchange import Exchange, Paths
from megatron_hetero.schedule.simulator.gathers import Gathers
from megatron_hetero.schedule.simulator.overlapped import compile_overlapped
from megatron_hetero.schedule.simulator.progress import SimulatedStage


def run_step(
    pipelines: Sequence[Pipeline],
    collectives: Sequence[Collective] = (),
    update_s: Sequence[Sequence[float]] | None = None,
    weights: Sequence[Collective] = (),
    *,
    lazily: bool = False,
) -> Run:
    """Simulate one step.

    Args:
        collectives: the gradient exchange, at the programmes' `gradient_sync` or, where they say
            so, during the last backward passes.
        update_s: seconds of the optimizer on each stage, [pipeline][stage]; all stages begin it
            together, because the gradient norm is one for all.
        weights: the exchange of new weights, which each holder begins after its update, or where
            first passes need them (`Collective.needed`) with the step.
        lazily: as of `Gathers`.
    Raises:
        CheckFailedError: some stage waits for a message that never comes.
    """
    return _EventEngine(pipelines, collectives).run(update_s, weights, lazily=lazily)


def computed_until_s(pipelines: Sequence[Pipeline]) -> dict[StageId, float]:
    """Simulate the pipelines of a step, without keeping a record; return when each stage's last
    computation ends.

    Raises:
        CheckFailedError: some stage waits for a message that never comes.
    """
    engine = _EventEngine(pipelines, (), records=False)
    engine.run(None, ())
    return {stage.id: stage.computed_s for stage in engine.stages.values()}


class _EventEngine:
    def __init__(
        self,
        pipelines: Sequence[Pipeline],
        collectives: Sequence[Collective],
        *,
        records: bool = True,
    ) -> None:
        self.records = records
        """Keep every pass and message, beside the times that they lead to."""
        # Shared by all pipelines: paths, the exchange, the record.
        self.paths = Paths()
        self.exchange_paths = Paths()
        self.exchange = Exchange(collectives, self.exchange_paths)
        self.gathers: Gathers | None = None
        """New weights that first passes wait for."""
        self.run_ = Run()
        self.stages: dict[StageId, SimulatedStage] = {}
        # Messages by (pipeline, key): when they arrive, when they are asked for, and who waits.
        self.arrival_s: dict[tuple[int, int], float] = {}
        self.asked_s: dict[tuple[int, int], float] = {}
        """When a receiver came to a message; what a waiting sender has to know."""
        self.waiting: dict[tuple[int, int], SimulatedStage] = {}
        self.asking: dict[tuple[int, int], SimulatedStage] = {}
        # Events in order of time, and stages that can go on now.
        self.queue: list[tuple[float, int, SimulatedStage | None, int]] = []
        self.num_queued = 0
        self.ready: list[SimulatedStage] = []
        self.pipelines = pipelines
        # Compile every stage's programme, reversed so that the next instruction is the last.
        known: dict[object, list[CompiledInstruction]] = {}  # pipelines alike have one programme
        for index, pipeline in enumerate(pipelines):
            compiled = compile_overlapped if pipeline.sends == "overlapped" else compile_programme
            for stage in range(pipeline.schedule.num_stages):
                made = SimulatedStage((index, stage))
                key = id(pipeline.schedule), stage, pipeline.times[stage], pipeline.sends
                if key not in known:
                    known[key] = compiled(pipeline, stage)[::-1]
                made.instructions = known[key].copy()
                self.stages[made.id] = made
                self.run_.operations[made.id] = made.operations

    def run(
        self,
        update_s: Sequence[Sequence[float]] | None,
        weights: Sequence[Collective],
        *,
        lazily: bool = False,
    ) -> Run:
        """Run until nothing can move any more."""
        if any(gather.needed for gather in weights):
            begin_s = dict.fromkeys(self.stages, 0.0)
            self.gathers = Gathers(weights, begin_s, lazily=lazily)
        for stage in self.stages.values():
            self._advance(stage)
        # Passes and messages, with gradients that start within the passes.
        self._until_nothing_moves()
        for stage in self.stages.values():
            if stage.instructions:
                at = " + ".join(str(operation) for operation in stage.instructions[-1].source)
                raise CheckFailedError(f"stage {stage.id[1]} waits for ever at {at}")
        # Then what all stages do together: rest of the exchange, update, new weights.
        self._exchanged()
        self._update(update_s)
        self._gather(weights)
        self.run_.path_busy_s = dict(self.paths.busy_s)
        self.run_.end_s = max((stage.now_s for stage in self.stages.values()), default=0.0)
        return self.run_

    def _until_nothing_moves(self) -> None:
        while self.queue:
            time_s, _, posting, collective = heappop(self.queue)
            if posting is not None:
                # A send's time has come: it takes its paths before anything later does.
                self._post(posting, time_s)
                self._advance(posting)
            else:
                self._run_collective(collective, time_s)
            # Stages that were waiting for it go on at once.
            while self.ready:
                self._advance(self.ready.pop())

    def _advance(self, stage: SimulatedStage) -> None:
        """Run a stage until a message is missing, or something must be taken in order of time."""
        instructions = stage.instructions
        pipeline = stage.id[0]
        while instructions:
            instruction = instructions[-1]
            # Messages take paths in order of time: let everything earlier go first.
            if instruction.sends and not stage.posted:
                self._queue(stage.now_s, stage, -1)
                return
            # A pass: it runs at once.
            if instruction.compute is not None:
                kind, micro_batch, chunk, seconds = instruction.compute
                start_s = stage.now_s
                if self.gathers is not None and kind == "forward":
                    start_s = self.gathers.begin_s(stage.id, chunk, start_s)
                stage.now_s = stage.computed_s = end_s = start_s + seconds
                if self.records:
                    stage.operations.append(OpSpan(kind, micro_batch, chunk, start_s, end_s))
                # The gradients that it completes may start their exchange.
                for completed in instruction.completes:
                    self._begin(self.exchange.final(stage.id, completed, end_s))
            else:
                # Messages: go on when all have arrived, else block.
                end = self._end_of_messages(stage, pipeline, instruction)
                if end is None:
                    stage.is_blocked = True
                    return
                stage.now_s = end
            stage.posted = False
            instructions.pop()
        # A stage is done when its last send has left it.
        stage.now_s = max(stage.now_s, stage.sent_until_s)
        self._begin(self.exchange.done(stage.id, stage.now_s))

    def _end_of_messages(
        self, stage: SimulatedStage, pipeline: int, instruction: CompiledInstruction
    ) -> float | None:
        """Return when all messages of an instruction are done; None while one is not on its way."""
        end_s = now_s = stage.now_s
        missing = False
        # Tell senders that the receiver has come, at the time when it comes.
        for message in instruction.asks:
            self._ask((pipeline, message), now_s)
        # Inputs: the latest arrival counts.
        for message in instruction.receives:
            key = (pipeline, message)
            # Asked for before, or now.
            if key not in self.asked_s:
                self._ask(key, now_s)
            arrival_s = self.arrival_s.get(key)
            if arrival_s is None:
                self.waiting[key] = stage
                missing = True
            elif arrival_s > end_s:
                end_s = arrival_s
        # Waited sends: done once they have arrived and been asked for.
        for send in instruction.awaits:
            key = (pipeline, send)
            asked_s = self.asked_s.get(key)
            if asked_s is None:
                self.asking[key] = stage
                missing = True
            else:
                end_s = max(end_s, self.arrival_s[key], asked_s)
        return None if missing else end_s

    def _ask(self, key: tuple[int, int], now_s: float) -> None:
        # A sender that waits for its receiver may end now.
        self.asked_s[key] = now_s
        self._wake(self.asking.pop(key, None))

    def _post(self, stage: SimulatedStage, now_s: float) -> None:
        stage.posted = True
        pipeline, number = stage.id
        for send in stage.instructions[-1].sends:
            # All paths from one moment on; usable a latency after the longest.
            crossing = send.crossing(self.pipelines[pipeline])
            start_s, end_s = self.paths.take(crossing.hops, now_s)
            arrival_s = end_s + crossing.latency_s
            key = (pipeline, send.key)
            self.arrival_s[key] = arrival_s
            stage.sent_until_s = max(stage.sent_until_s, arrival_s)
            if self.records:
                ends = start_s, end_s, arrival_s
                span = MessageSpan(pipeline, number, send.receiver, send.operation, now_s, *ends)
                self.run_.messages.append(span)
            # A receiver that came too early goes on with the arrival.
            self._wake(self.waiting.pop(key, None))

    def _begin(self, found: Iterable[tuple[float, int]]) -> None:
        for time_s, collective in found:
            self._queue(time_s, None, collective)

    def _run_collective(self, number: int, now_s: float) -> None:
        self._record("gradient_sync", *self.exchange.run(number, now_s))
        self._begin(self.exchange.after(number))

    def _record(
        self, kind: OperationKind, collective: Collective, start_s: float, end_s: float
    ) -> None:
        # Every holder has a span of it, though the stage may compute meanwhile.
        self.run_.collectives.append((collective, start_s, end_s))
        for holder in collective.holders:
            self.stages[holder].operations.append(OpSpan(kind, -1, 0, start_s, end_s))

    def _exchanged(self) -> None:
        """Wait on every stage for its own collectives."""
        for stage, end_s in self.exchange.ends_s().items():
            self.stages[stage].now_s = max(self.stages[stage].now_s, end_s)

    def _gather(self, weights: Sequence[Collective]) -> None:
        """Gather new weights, for which each stage waits after its update, if no pass has."""
        from_s = {stage.id: stage.now_s for stage in self.stages.values()}
        gathers = self.gathers or Gathers(weights, from_s)
        for gather, start_s, end_s in gathers.spans:
            self._record("weight_sync", gather, start_s, end_s)
            for holder in () if gather.needed else gather.holders:
                self.stages[holder].now_s = max(self.stages[holder].now_s, end_s)
        for taken in (self.exchange_paths, gathers.paths):
            for path, seconds in taken.busy_s.items():
                self.paths.busy_s[path] += seconds

    def _update(self, update_s: Sequence[Sequence[float]] | None) -> None:
        if update_s is None:
            return
        # The norm of gradients is one for all: no stage updates before the last is done.
        start_s = max(stage.now_s for stage in self.stages.values())
        for (pipeline, number), stage in self.stages.items():
            stage.now_s = start_s + update_s[pipeline][number]
            stage.operations.append(OpSpan("step", -1, 0, start_s, stage.now_s))

    def _queue(self, time_s: float, stage: SimulatedStage | None, collective: int) -> None:
        # The number keeps equal times in the order in which they came up.
        self.num_queued += 1
        heappush(self.queue, (time_s, self.num_queued, stage, collective))

    def _wake(self, stage: SimulatedStage | None) -> None:
        """Release a stage blocked on something now known."""
        if stage is not None and stage.is_blocked:
            stage.is_blocked = False
            self.ready.append(stage)
