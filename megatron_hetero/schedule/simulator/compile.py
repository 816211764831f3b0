"""Compile a stage's programme into the terms of the simulator's engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.parts import Crossing, Pipeline
from megatron_hetero.schedule.programme import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Instruction,
    Operation,
    OperationKind,
)

_GRADIENTS = ("backward", "backward_weight")
_FORWARD = ("forward", "send_forward", "recv_forward")


class CompiledSend(NamedTuple):
    """A message to be posted over a boundary; `key` names it on both sides."""

    key: int
    operation: Operation
    receiver: int
    boundary: int
    is_forward: bool

    def crossing(self, pipeline: Pipeline) -> Crossing:
        """Return what the message takes in a pipeline of this programme."""
        return (pipeline.forward if self.is_forward else pipeline.backward)[self.boundary]


@dataclass(slots=True)
class CompiledInstruction:
    """An instruction in the engine's terms: its computation, its sends, and what it waits for.

    `receives` are asked for, unless that was done before, and waited for; `asks` are only asked
    for.  `awaits` are sends, its own or earlier ones, whose receivers must have them.
    """

    source: Instruction
    compute: tuple[OperationKind, int, int, float] | None = None
    completes: tuple[int, ...] = ()
    """Chunks whose gradients may be exchanged when the computation ends."""
    sends: tuple[CompiledSend, ...] = ()
    receives: tuple[int, ...] = ()
    asks: tuple[int, ...] = ()
    awaits: tuple[int, ...] = ()


class Messages:
    """The messages of a stage of a pipeline, by the passes before and behind each message."""

    def __init__(self, pipeline: Pipeline, stage: int) -> None:
        schedule = pipeline.schedule
        self._chain, self._num_micro_batches = schedule.chain, schedule.num_micro_batches
        self._places = [schedule.virtual_stage(stage, c) for c in range(schedule.num_chunks(stage))]

    def input_of(self, work: Operation) -> int | None:
        """Return the key of the message that feeds a pass (or the pass before or after a message);
        None at the ends."""
        is_forward = work.kind in _FORWARD
        # A forward comes over the boundary before the chunk, a gradient over the one behind it.
        boundary = self._places[work.chunk] - is_forward
        if not 0 <= boundary < len(self._chain) - 1:
            return None
        return self._key(boundary, is_forward, work.micro_batch)

    def output_of(self, work: Operation) -> CompiledSend | None:
        """Return the message that a pass makes; None at the ends."""
        is_forward = work.kind in _FORWARD
        # The other way round for what the pass makes.
        boundary = self._places[work.chunk] - (not is_forward)
        if not 0 <= boundary < len(self._chain) - 1:
            return None
        kind: OperationKind = "send_forward" if is_forward else "send_backward"
        return CompiledSend(
            self._key(boundary, is_forward, work.micro_batch),
            work if work.kind == kind else Operation(kind, work.micro_batch, work.chunk),
            self._chain[boundary + 1 if is_forward else boundary],
            boundary,
            is_forward,
        )

    def _key(self, boundary: int, is_forward: bool, micro_batch: int) -> int:
        # A number for each message of the pipeline: channel by channel, then micro-batch.
        return (2 * boundary + is_forward) * self._num_micro_batches + micro_batch


def computation(pipeline: Pipeline, stage: int, work: Operation) -> CompiledInstruction:
    """Compile one pass."""
    seconds = pipeline.times[stage][work.chunk].seconds(work.kind)
    return CompiledInstruction((work,), compute=(work.kind, work.micro_batch, work.chunk, seconds))


def mark_final(compiled: Sequence[CompiledInstruction], num_later: int = 0) -> None:
    """Mark the last backward pass of each chunk, after which the chunk's gradients are complete;
    they are exchanged when `num_later` more backward passes have ended, or with the programme."""
    # Backward passes of the stage in order, with their chunks.
    backwards = [
        (instruction, instruction.compute[2])
        for instruction in compiled
        if instruction.compute is not None and instruction.compute[0] in _GRADIENTS
    ]
    # The last one of each chunk; where too few passes follow, the programme's end stands for them.
    last = {chunk: index for index, (_, chunk) in enumerate(backwards)}
    for chunk, index in last.items():
        if index + num_later < len(backwards):
            backwards[index + num_later][0].completes += (chunk,)


def compile_programme(pipeline: Pipeline, stage: int) -> list[CompiledInstruction]:
    """Compile the programme of a stage up to its gradient exchange."""
    messages = Messages(pipeline, stage)
    compiled: list[CompiledInstruction] = []
    for instruction in pipeline.schedule.programmes[stage]:
        kind = instruction[0].kind
        # The end of the programme is the exchange's own work.
        if kind in ("gradient_sync", "step"):
            break
        # A computation.
        if kind in COMPUTE and len(instruction) == 1:
            compiled.append(computation(pipeline, stage, instruction[0]))
            continue
        # Messages posted together: find each one's key, by the pass beside it.
        sends, receives = [], []
        for operation in instruction:
            send = key = None
            if operation.kind in SENDS:
                send = messages.output_of(operation)
            elif operation.kind in RECEIVES:
                key = messages.input_of(operation)
            if send is not None:
                sends.append(send)
            elif key is not None:
                receives.append(key)
            else:
                raise CheckFailedError(
                    f"stage {stage} posts {operation} together with messages, or over no boundary; "
                    "a computation is an instruction of its own"
                )
        # A waited send ends when the receiver has it; a buffered one at once.
        awaits = tuple(
            send.key
            for send in sends
            if pipeline.sends == "waited"
            or (pipeline.sends == "rendezvous" and not send.crossing(pipeline).is_eager)
        )
        compiled.append(
            CompiledInstruction(
                instruction, sends=tuple(sends), receives=tuple(receives), awaits=awaits
            )
        )
    # Chunks' last backward passes start the exchange of their gradients.
    mark_final(compiled)
    return compiled
