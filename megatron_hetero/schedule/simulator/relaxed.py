"""Ends of all stages of a schedule for many divisions of the layers at once: a lower bound.

The schedule is run once, on arrays: entry k of each is a division of the layers of its own.  The
programmes are those of the simulator (`schedule.simulator.compile`, `overlapped`), with what they
wait for.  The messages of one stage to another have a path to themselves here.  In a real step
(`schedule.simulator.step`) other stages and replicas may share paths and take turns, so nothing
there ends sooner than here; where nothing is shared, both are equal.

No time decides which operation comes next, so the order of the operations is worked out once for a
schedule and serves all prices.  A compiled loop (`_kernels.c`) runs the operations; where it is
missing the same in Python does, equal to the bit.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import batched

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.kernels import KERNELS
from megatron_hetero.schedule.parts import ChunkTimes, Pipeline, SendMode
from megatron_hetero.schedule.programme import OperationKind, Schedule
from megatron_hetero.schedule.simulator.compile import (
    CompiledInstruction,
    CompiledSend,
    compile_programme,
)
from megatron_hetero.schedule.simulator.overlapped import compile_overlapped

Seconds = NDArray[np.float64]
"""Seconds for each division of the layers, shape [division]."""

ChunkSeconds = tuple[Seconds, Seconds]
"""Forward and backward pass of one micro-batch on a model chunk."""

BoundarySeconds = tuple[float, float]
"""Seconds for which a message takes a boundary's path, and the seconds of latency after them."""


_COMPUTE, _SEND, _ASK, _ARRIVE, _AGREE = range(5)
"""Kinds of steps: a computation; a send; a stage comes to a receive; a stage waits until a message
is there; a sender waits until its receiver has come to the message."""

# A step is four numbers: its kind, the stage, and two more: of a computation its row of seconds
# (`RelaxedRun.spans_s`) and 0, of a send its channel (a sender and a receiver) and its
# message, else its message and 0.


class RelaxedRun:
    """The steps of a schedule, in an order in which all of them can run.

    Raises:
        CheckFailedError: a stage waits for ever, or computes what is not part of Megatron's own
            schedules.
    """

    def __init__(self, schedule: Schedule, sends: SendMode) -> None:
        self._num_stages = schedule.num_stages
        order = _StepOrder(schedule, sends)
        # Steps one after the other, four numbers each.
        self._flat = array("i", order.steps())
        self._num_messages = order.num_messages + schedule.num_stages
        self._boundaries = order.boundaries

    def spans_s(
        self,
        times: Sequence[Sequence[ChunkSeconds]],
        forward: Sequence[BoundarySeconds],
        backward: Sequence[BoundarySeconds],
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return when the gradients of each stage may be exchanged at the earliest, and the end of
        its last computation or message, each [stage, division].

        The first stage begins its exchange within the last backward pass of a chunk, the others
        after it (`schedule.exchange.gradients`).

        Args:
            times: [stage][chunk].
            forward: of each boundary of the schedule's chain, as are `backward`; equal for
                boundaries between the same two stages in the same direction.
        """
        # Shape [pass, division]: forward and backward of each chunk, stage by stage.
        rows = np.array([pass_s for of_stage in times for chunk in of_stage for pass_s in chunk])
        # The marks of stages cross nothing.
        crossings = [(0.0, 0.0)] * self._num_stages
        crossings += [
            (forward if is_forward else backward)[boundary]
            for boundary, is_forward in self._boundaries
        ]
        num_clocks = 2 * self._num_stages
        ends_s = np.empty((num_clocks, rows.shape[1]))
        # The compiled loop does the same operations in the same order.
        if KERNELS is None:
            self._run(rows, crossings, ends_s)
        else:
            busy_s, latency_s = [c[0] for c in crossings], [c[1] for c in crossings]
            KERNELS.relaxed_ends(
                self._flat, self._num_messages, rows, busy_s, latency_s, num_clocks, ends_s
            )
        return ends_s[self._num_stages :], ends_s[: self._num_stages]

    def _run(
        self,
        rows: NDArray[np.float64],
        crossings: Sequence[BoundarySeconds],
        ends_s: NDArray[np.float64],
    ) -> None:
        # All arrays have the shape [division]; lists are by stage, channel or message.
        zero = np.zeros(rows.shape[1])
        now_s, sent_until_s = [zero] * len(ends_s), [zero] * len(ends_s)
        free_s = [zero] * len(crossings)
        arrival_s, asked_s = [zero] * self._num_messages, [zero] * self._num_messages
        for kind, stage, number, message in batched(self._flat, 4):
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

    def __init__(self, schedule: Schedule, sends: SendMode) -> None:
        # The seconds come later: of the programmes only the order counts.
        counts = [schedule.num_chunks(stage) for stage in range(schedule.num_stages)]
        times = tuple((ChunkTimes(0.0, 0.0),) * count for count in counts)
        pipeline = Pipeline(schedule, times, (), (), sends)
        compiled = compile_overlapped if sends == "overlapped" else compile_programme
        self._left = [compiled(pipeline, stage)[::-1] for stage in range(schedule.num_stages)]
        """[stage], the last comes next."""
        self._last_backwards = [_first_of_last_backwards(of_stage) for of_stage in self._left]
        # Two rows for each chunk of the stages before.
        self._rows = [2 * sum(counts[:stage]) for stage in range(schedule.num_stages)]
        # Channels by the numbers under which they are found; a message's number is its key.
        # The first channels are those of the marks.
        self._channels: dict[tuple[int, int], int] = {}
        self.boundaries: list[tuple[int, bool]] = []
        """A boundary of the chain that each channel between stages leads over, and whether forward.
        """
        self.num_messages = 2 * (len(schedule.chain) - 1) * schedule.num_micro_batches
        """Messages of all stages, each way over each boundary."""
        self._is_sent: set[int] = set()
        self._is_asked: set[int] = set()
        self._has_come = [False] * schedule.num_stages
        """The messages of the next instruction are posted and asked for."""
        self._made: list[int] = []

    def steps(self) -> list[int]:
        """Return all steps.

        Raises:
            CheckFailedError: as `RelaxedRun`.
        """
        # Ends when a whole round of the stages moves nothing.
        before = -1
        while before < len(self._made):
            before = len(self._made)
            for stage in range(len(self._left)):
                self._advance(stage)
        for stage, left in enumerate(self._left):
            if left:
                raise CheckFailedError(f"stage {stage} waits for ever")
        return self._made

    def _advance(self, stage: int) -> None:
        left, made = self._left[stage], self._made
        while left:
            instruction = left[-1]
            if instruction.compute is not None:
                kind, _, chunk, _ = instruction.compute
                step = _COMPUTE, stage, self._rows[stage] + _row_of(kind, chunk), 0
                if len(left) != self._last_backwards[stage]:
                    made += step
                else:
                    mark = self._mark(stage)
                    made += (*mark, *step) if stage == 0 else (*step, *mark)
            else:
                # Messages are posted and asked for once, though the stage may come here several
                # times.
                if not self._has_come[stage]:
                    self._has_come[stage] = True
                    self._come(stage, instruction)
                if not self._is_sent.issuperset(instruction.receives):
                    return
                if not self._is_asked.issuperset(instruction.awaits):
                    return
                # Everything is there: the stage's time is the latest of all.
                for key in (*instruction.receives, *instruction.awaits):
                    made += _ARRIVE, stage, key, 0
                for key in instruction.awaits:
                    made += _AGREE, stage, key, 0
                self._has_come[stage] = False
            left.pop()

    def _mark(self, stage: int) -> tuple[int, ...]:
        """Return steps that keep the stage's time, on a clock behind those of all stages."""
        message = self.num_messages + stage
        return _SEND, stage, stage, message, _ARRIVE, len(self._left) + stage, message, 0

    def _come(self, stage: int, instruction: CompiledInstruction) -> None:
        for key in (*instruction.asks, *instruction.receives):
            # What was asked for ahead is not asked for again.
            if key not in self._is_asked:
                self._is_asked.add(key)
                self._made += _ASK, stage, key, 0
        for send in instruction.sends:
            self._is_sent.add(send.key)
            self._made += _SEND, stage, self._channel(stage, send), send.key

    def _channel(self, stage: int, send: CompiledSend) -> int:
        """Return the number of the path that a stage's messages to another take."""
        ends = stage, send.receiver
        if ends not in self._channels:
            self._channels[ends] = len(self._left) + len(self.boundaries)
            self.boundaries.append((send.boundary, send.is_forward))
        return self._channels[ends]


def _first_of_last_backwards(left: Sequence[CompiledInstruction]) -> int:
    """Return how many instructions are left when the first of a stage's chunks comes to its last
    backward pass.

    Args:
        left: instructions of the stage, the last comes next.
    """
    found: dict[int, int] = {}
    for number, instruction in enumerate(left, 1):
        if instruction.compute is not None and instruction.compute[0] == "backward":
            found.setdefault(instruction.compute[2], number)
    return max(found.values(), default=0)


def _row_of(kind: OperationKind, chunk: int) -> int:
    """Return the row of a computation among those of its stage."""
    if kind not in ("forward", "backward"):
        raise CheckFailedError(f"{kind} is not part of Megatron's own schedules")
    return 2 * chunk + (kind == "backward")
