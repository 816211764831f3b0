"""A stage's programme in the terms of the simulator's engine, which runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.schedule.programme import (
    COMPUTE,
    RECEIVES,
    SENDS,
    Instruction,
    Operation,
    OperationKind,
)
from megatron_hetero.schedule.simulator_parts import Crossing, Pipeline

_GRADIENTS = ("backward", "backward_weight")


class CompiledSend(NamedTuple):
    """A message to be posted; `key` names it on both sides."""

    key: int
    operation: Operation
    receiver: int
    crossing: Crossing


@dataclass(slots=True)
class CompiledInstruction:
    """An instruction, compiled: what it computes, what it sends, what it waits for."""

    source: Instruction
    compute: tuple[OperationKind, int, int, float] | None = None
    is_final: bool = False
    """The computation completes the gradients of its chunk."""
    sends: tuple[CompiledSend, ...] = ()
    receives: tuple[int, ...] = ()


def compile_programme(pipeline: Pipeline, stage: int) -> list[CompiledInstruction]:
    """The programme of a stage up to its gradient exchange, in the engine's terms."""
    schedule = pipeline.schedule
    num_micro_batches = schedule.num_micro_batches
    places = [schedule.virtual_stage(stage, c) for c in range(schedule.num_chunks(stage))]
    chain = schedule.chain
    compiled: list[CompiledInstruction] = []
    last: dict[int, CompiledInstruction] = {}
    for instruction in schedule.programmes[stage]:
        kind = instruction[0].kind
        if kind in ("gradient_sync", "step"):
            break
        if kind in COMPUTE and len(instruction) == 1:
            work = instruction[0]
            seconds = pipeline.times[stage][work.chunk].seconds(kind)
            compiled.append(
                CompiledInstruction(
                    instruction, compute=(kind, work.micro_batch, work.chunk, seconds)
                )
            )
            if kind in _GRADIENTS:
                last[work.chunk] = compiled[-1]
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
                sends.append(CompiledSend(key, operation, receiver, crossing))
            else:
                receives.append(key)
        compiled.append(
            CompiledInstruction(instruction, sends=tuple(sends), receives=tuple(receives))
        )
    for final in last.values():
        final.is_final = True
    return compiled
