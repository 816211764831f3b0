"""The programme of one stage, with the receives to post before each instruction."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

from megatron_hetero.runtime.faults.marks import programme_phases
from megatron_hetero.runtime.faults.progress import Phase
from megatron_hetero.schedule.orders.delivery import arrived_sends, stage_posts
from megatron_hetero.schedule.orders.early_gradients import early_gradients
from megatron_hetero.schedule.programme import (
    RECEIVES,
    Instruction,
    Message,
    Operation,
    Schedule,
)


class StageProgramme:
    """Instructions of stage `stage` of `schedule`, for training and for validation."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        watched: Callable[[str], AbstractContextManager[None]] | None = None,
        most_posted: Mapping[int, int] | None = None,
    ) -> None:
        """Derive the instructions of validation, and the receives to post, from a schedule.

        Args:
            schedule: the schedule of the replica.
            stage: index of the stage in it.
            watched: `watched(kind)` is entered around every operation.
            most_posted: boundary -> receives that may be posted and not yet taken
                (`plan.communication.under_way`); None does not limit them.
        """
        self.watched = watched or (lambda _kind: contextlib.nullcontext())
        self.schedule = schedule
        self.stage = stage
        self.arrived = arrived_sends(schedule, stage)
        self._training = schedule.programmes[stage]
        made = stage_posts(schedule, stage, most_posted)
        self._validation, self._posts = made.forwards, (made.training, made.validation)
        self._phases = programme_phases(self._training), programme_phases(self._validation)

    def instructions(self, forward_only: bool) -> tuple[Instruction, ...]:
        """Return the instructions of a step of training, or of validation."""
        return self._validation if forward_only else self._training

    def posts(self, forward_only: bool) -> tuple[tuple[int, ...], ...]:
        """Return, for each instruction, the boundaries of receives to post before the instruction.
        """
        return self._posts[forward_only]

    def phases(self, forward_only: bool) -> tuple[tuple[Phase, ...], ...]:
        """[instruction] -> the phase of each of its operations."""
        return self._phases[forward_only]

    def receives(self, forward_only: bool) -> dict[int, Iterator[Operation]]:
        """Return, by boundary, the operations that receive in a step, in order."""
        found: dict[int, list[Operation]] = {}
        for instruction in self.instructions(forward_only):
            for operation in instruction:
                if operation.kind in RECEIVES:
                    found.setdefault(self.message(operation).boundary, []).append(operation)
        return {boundary: iter(operations) for boundary, operations in found.items()}

    def message(self, operation: Operation) -> Message:
        """Return the message that an operation sends or receives."""
        return self.schedule.message(self.stage, operation)

    def early_gradients(self, *, aligned: bool) -> Mapping[Operation, tuple[int, ...]]:
        """Return `schedule.orders.early_gradients` of this stage."""
        return early_gradients(self.schedule, self.stage, aligned=aligned)

    def has_loss(self, chunk: int) -> bool:
        """Tell if a model chunk is the last of the chain."""
        schedule = self.schedule
        return schedule.virtual_stage(self.stage, chunk) == len(schedule.chain) - 1
