"""Ends of all stages of a schedule for many divisions of the layers at once: a lower bound.

The schedule is run once, on arrays: entry k of each is a division of the layers of its own.  Each
boundary has a path to itself here.  In a real step (`schedule.simulator.step`) boundaries and
replicas may share paths and take turns, so nothing there ends sooner than here; where nothing is
shared, both are equal.

No time decides which operation comes next, so the order of the operations is worked out once for a
schedule and serves all prices.  A compiled loop (`_kernels.c`) runs the operations; where it is
missing the same in Python does, equal to the bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.kernels import KERNELS
from megatron_hetero.schedule.parts import SendMode
from megatron_hetero.schedule.programme import (
    COMPUTE,
    RECEIVES,
    Instruction,
    Message,
    Schedule,
)

Seconds = NDArray[np.float64]
"""Seconds for each division of the layers, shape [division]."""

ChunkSeconds = tuple[Seconds, Seconds]
"""Forward and backward pass of one micro-batch on a model chunk."""

BoundarySeconds = tuple[float, float]
"""Seconds for which a message takes a boundary's path, and the seconds of latency after them."""


_COMPUTE, _SEND, _ASK, _ARRIVE, _AGREE = range(5)
"""Kinds of steps: a computation; a send; a stage comes to a receive; a stage waits until a message
is there; a sender waits until its receiver has come to the message."""

_Step = tuple[int, int, int, int]
"""Kind, stage, and two numbers: of a computation its row of seconds (`RelaxedRun.stage_ends_s`) and
0, of a send its channel (2 * boundary + goes forward) and its message, else its message and 0."""


class RelaxedRun:
    """The steps of a schedule, in an order in which all of them can run.

    Raises:
        CheckFailedError: a stage waits for ever, or computes what is not part of Megatron's own
            schedules.
    """

    def __init__(self, schedule: Schedule, sends: SendMode) -> None:
        self._num_stages, self._num_channels = schedule.num_stages, 2 * len(schedule.chain) - 2
        order = _StepOrder(schedule, sends == "waited")
        self._steps = list(order.steps())
        self._num_messages = order.num_messages
        self._flat = array("i", [number for step in self._steps for number in step])

    def stage_ends_s(
        self,
        times: Sequence[Sequence[ChunkSeconds]],
        forward: Sequence[BoundarySeconds],
        backward: Sequence[BoundarySeconds],
    ) -> NDArray[np.float64]:
        """Return the end of each stage's last computation or message, [stage, division].

        Args:
            times: [stage][chunk].
            forward: of each boundary of the schedule's chain, as are `backward`.
        """
        # Shape [pass, division]: forward and backward of each chunk, stage by stage.
        rows = np.array([pass_s for of_stage in times for chunk in of_stage for pass_s in chunk])
        # Channel 2 b is backward over boundary b, channel 2 b + 1 forward.
        crossings = [both for pair in zip(backward, forward, strict=True) for both in pair]
        ends_s = np.empty((self._num_stages, rows.shape[1]))
        # The compiled loop does the same operations in the same order.
        if KERNELS is None:
            self._run(rows, crossings, ends_s)
        else:
            busy_s, latency_s = [c[0] for c in crossings], [c[1] for c in crossings]
            KERNELS.relaxed_ends(
                self._flat, self._num_messages, rows, busy_s, latency_s, self._num_stages, ends_s
            )
        return ends_s

    def _run(
        self,
        rows: NDArray[np.float64],
        crossings: Sequence[BoundarySeconds],
        ends_s: NDArray[np.float64],
    ) -> None:
        # All arrays have the shape [division]; lists are by stage, channel or message.
        zero = np.zeros(rows.shape[1])
        now_s, sent_until_s = [zero] * self._num_stages, [zero] * self._num_stages
        free_s = [zero] * self._num_channels
        arrival_s, asked_s = [zero] * self._num_messages, [zero] * self._num_messages
        for kind, stage, number, message in self._steps:
            if kind == _COMPUTE:
                # New arrays, never in place, because stages and messages share them.
                now_s[stage] = now_s[stage] + rows[number]
            elif kind == _SEND:
                busy_s, latency_s = crossings[number]
                free_s[number] = np.maximum(now_s[stage], free_s[number]) + busy_s
                arrival_s[message] = free_s[number] + latency_s
                sent_until_s[stage] = np.maximum(sent_until_s[stage], arrival_s[message])
            elif kind == _ASK:
                asked_s[number] = now_s[stage]
            elif kind == _ARRIVE:
                now_s[stage] = np.maximum(now_s[stage], arrival_s[number])
            else:
                now_s[stage] = np.maximum(now_s[stage], asked_s[number])
        ends_s[:] = np.maximum(now_s, sent_until_s)


class _StepOrder:
    """Stages that advance in turn, each as far as the others have come."""

    def __init__(self, schedule: Schedule, sends_wait: bool) -> None:
        self._sends_wait = sends_wait
        numbers: dict[Message, int] = {}
        rows = 0
        self._left: list[list[tuple[int, list[int], list[int]]]] = []
        """[stage], the last comes next: row of the computation or -1, messages received, sent."""
        for stage, programme in enumerate(schedule.programmes):
            made = []
            for instruction in programme:
                # Exchange and optimizer come after the pipeline.
                if instruction[0].kind in ("gradient_sync", "step"):
                    continue
                received: list[int] = []
                sent: list[int] = []
                # A computation stands alone; anything else is messages posted together.
                if instruction[0].kind in COMPUTE:
                    made.append((rows + _row_of(instruction), received, sent))
                    continue
                for operation in instruction:
                    message = schedule.message(stage, operation)
                    number = numbers.setdefault(message, len(numbers))
                    (received if operation.kind in RECEIVES else sent).append(number)
                made.append((-1, received, sent))
            self._left.append(made[::-1])
            # Two rows for each chunk of the stages before.
            rows += 2 * schedule.num_chunks(stage)
        self._channels = [2 * message.boundary + message.is_forward for message in numbers]
        self._is_sent, self._is_asked = [False] * len(numbers), [False] * len(numbers)
        self._has_come = [False] * schedule.num_stages
        """The messages of the next instruction are posted and asked for."""

    @property
    def num_messages(self) -> int:
        """Messages of all stages."""
        return len(self._channels)

    def steps(self) -> Iterator[_Step]:
        """Yield all steps.

        Raises:
            CheckFailedError: as `RelaxedRun`.
        """
        # Ends when a whole round of the stages moves nothing.
        moved = True
        while moved:
            moved = False
            for stage in range(len(self._left)):
                for step in self._advance(stage):
                    moved = True
                    yield step
        for stage, left in enumerate(self._left):
            if left:
                raise CheckFailedError(f"stage {stage} waits for ever")

    def _advance(self, stage: int) -> Iterator[_Step]:
        left = self._left[stage]
        while left:
            row, received, sent = left[-1]
            if row >= 0:
                yield _COMPUTE, stage, row, 0
            else:
                # Messages are posted and asked for once, though the stage may come here several
                # times.
                if not self._has_come[stage]:
                    self._has_come[stage] = True
                    yield from self._come(stage, received, sent)
                waited = sent if self._sends_wait else []
                if not all(self._is_sent[message] for message in received):
                    return
                if not all(self._is_asked[message] for message in waited):
                    return
                # Everything is there: the stage's time is the latest of all.
                for message in (*received, *waited):
                    yield _ARRIVE, stage, message, 0
                for message in waited:
                    yield _AGREE, stage, message, 0
                self._has_come[stage] = False
            left.pop()

    def _come(self, stage: int, received: Sequence[int], sent: Sequence[int]) -> Iterator[_Step]:
        for message in received:
            self._is_asked[message] = True
            yield _ASK, stage, message, 0
        for message in sent:
            self._is_sent[message] = True
            yield _SEND, stage, self._channels[message], message


def _row_of(instruction: Instruction) -> int:
    """Return the row of a computation among those of its stage."""
    kind = instruction[0].kind
    if kind not in ("forward", "backward"):
        raise CheckFailedError(f"{kind} is not part of Megatron's own schedules")
    return 2 * instruction[0].chunk + (kind == "backward")
