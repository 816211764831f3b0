"""Ends of all stages of a schedule for many divisions of the layers at once: a lower bound.

The schedule is run once, on arrays: entry k of each is a division of the layers of its own.  Each
boundary has a path to itself here.  In a real step (`schedule.simulator.step`) boundaries and
replicas may share paths and take turns, so nothing there ends sooner than here; where nothing is
shared, both are equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.parts import Crossing, SendMode
from megatron_hetero.schedule.programme import (
    COMPUTE,
    RECEIVES,
    Instruction,
    Message,
    Operation,
    Schedule,
)

Seconds = NDArray[np.float64]
"""Seconds for each division of the layers, shape [division]."""

ChunkSeconds = tuple[Seconds, Seconds]
"""Forward and backward pass of one micro-batch on a model chunk."""


def stage_ends_s(
    schedule: Schedule,
    times: Sequence[Sequence[ChunkSeconds]],
    forward: Sequence[Crossing],
    backward: Sequence[Crossing],
    sends: SendMode,
) -> list[Seconds]:
    """Return the end of each stage's last computation or message, [stage] of [division].

    Args:
        times: [stage][chunk].
        forward: of each boundary of the schedule's chain, as are `backward`.
    Raises:
        CheckFailedError: a stage waits for ever.
    """
    # One run carries all divisions at once: every time is an array over them.
    run = _RelaxedRun(schedule, forward, backward, sends == "waited")
    num_divisions = len(times[0][0][0])
    stages = [
        _RelaxedStage(index, schedule.programmes[index], times[index], np.zeros(num_divisions))
        for index in range(schedule.num_stages)
    ]
    # Advance stages until none can move.
    while any(run.advance(stage) for stage in stages):
        pass
    # A stage that stopped before its end waits for a message that never comes.
    for stage in stages:
        if not stage.is_done:
            raise CheckFailedError(f"stage {stage.index} waits for ever")
    return [np.maximum(stage.now_s, stage.sent_until_s) for stage in stages]


class _RelaxedStage:
    def __init__(
        self,
        index: int,
        programme: Sequence[Instruction],
        times: Sequence[ChunkSeconds],
        zero: Seconds,
    ) -> None:
        self.index, self.times = index, times
        self.instructions = [i for i in programme if i[0].kind not in ("gradient_sync", "step")]
        self.next = 0
        self.has_come = False
        """The messages of the next instruction are posted and asked for."""
        self.now_s = self.sent_until_s = zero

    @property
    def is_done(self) -> bool:
        return self.next == len(self.instructions)

    def seconds(self, operation: Operation) -> Seconds:
        """Return the seconds of a computation."""
        forward_s, backward_s = self.times[operation.chunk]
        if operation.kind == "forward":
            return forward_s
        if operation.kind == "backward":
            return backward_s
        raise CheckFailedError(f"{operation.kind} is not part of Megatron's own schedules")


class _RelaxedRun:
    def __init__(
        self,
        schedule: Schedule,
        forward: Sequence[Crossing],
        backward: Sequence[Crossing],
        sends_wait: bool,
    ) -> None:
        self._schedule, self._sends_wait = schedule, sends_wait
        self._crossings = {False: backward, True: forward}
        self._free_s: dict[tuple[int, bool], Seconds] = {}
        self._arrival_s: dict[Message, Seconds] = {}
        self._asked_s: dict[Message, Seconds] = {}

    def advance(self, stage: _RelaxedStage) -> bool:
        """Advance a stage as far as the others have come; return whether it moved."""
        moved = False
        while not stage.is_done:
            instruction = stage.instructions[stage.next]
            if instruction[0].kind in COMPUTE:
                stage.now_s = stage.now_s + stage.seconds(instruction[0])
            else:
                if not stage.has_come:
                    self._come(stage, instruction)
                    moved = True
                if not self._is_ready(stage, instruction):
                    return moved
                stage.now_s = self._end_s(stage, instruction)
                stage.has_come = False
            stage.next += 1
            moved = True
        return moved

    def _come(self, stage: _RelaxedStage, instruction: Instruction) -> None:
        stage.has_come = True
        for operation in instruction:
            message = self._schedule.message(stage.index, operation)
            if operation.kind in RECEIVES:
                self._asked_s[message] = stage.now_s
                continue
            boundary, is_forward, _ = message
            crossing = self._crossings[is_forward][boundary]
            free_s = self._free_s.get((boundary, is_forward), stage.now_s)
            done_s = np.maximum(stage.now_s, free_s) + crossing.serialisation_s
            self._free_s[boundary, is_forward] = done_s
            self._arrival_s[message] = arrival_s = done_s + crossing.latency_s
            stage.sent_until_s = np.maximum(stage.sent_until_s, arrival_s)

    def _is_ready(self, stage: _RelaxedStage, instruction: Instruction) -> bool:
        for operation in instruction:
            message = self._schedule.message(stage.index, operation)
            if operation.kind in RECEIVES:
                if message not in self._arrival_s:
                    return False
            elif self._sends_wait and message not in self._asked_s:
                return False
        return True

    def _end_s(self, stage: _RelaxedStage, instruction: Instruction) -> Seconds:
        end_s = stage.now_s
        for operation in instruction:
            message = self._schedule.message(stage.index, operation)
            if operation.kind in RECEIVES:
                end_s = np.maximum(end_s, self._arrival_s[message])
            elif self._sends_wait:
                end_s = np.maximum(end_s, self._arrival_s[message])
                end_s = np.maximum(end_s, self._asked_s[message])
        return end_s
