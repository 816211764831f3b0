"""Runs one stage's programme: Megatron's own forward and backward steps, our boundaries.

The programme says what is due when (`schedule.programme`); what a forward or a backward is stays
Megatron's (`forward_step`, `backward_step` of `megatron.core.pipeline_parallel.schedules`), and so
does everything around them that its schedules do: the report of losses, the count of tokens,
`no_sync` until the last gradient of a model chunk, `finalize_model_grads_func`, timers, and
validation, where only the forwards of the programme are run.

Sends never hold up the stage.  Receives are posted as soon as their messages can be under way
(`schedule.orders.delivery`) and waited for where the programme has them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface,
)
from megatron.core.utils import get_model_config

from megatron_hetero.runtime.faults.marks import finishing_gradients, programme_phases
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.gradients.sync_off import GradientSyncOff
from megatron_hetero.runtime.gradients.weight_gradients import WeightGradients
from megatron_hetero.runtime.parallel.boundary import Boundary, PipelineCommunicator
from megatron_hetero.schedule.orders.delivery import (
    arrived_sends,
    posts_within,
    receive_posts,
    receive_windows,
)
from megatron_hetero.schedule.programme import (
    RECEIVES,
    Instruction,
    Message,
    Operation,
    Schedule,
)

_FORWARD_ONLY = ("forward", "send_forward", "recv_forward")
_GRADIENTS = ("backward", "backward_weight")


class Executor:
    """Runs stage `stage` of `schedule`, one call for each step."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        watched: Callable[[str], AbstractContextManager[None]] | None = None,
    ) -> None:
        """`watched(kind)` goes around every operation (see `runtime.observe.stage_ratio`)."""
        self.watched = watched or (lambda _kind: contextlib.nullcontext())
        self.schedule = schedule
        self.stage = stage
        self.arrived = arrived_sends(schedule, stage)
        self._training = schedule.programmes[stage]
        forwards = (
            tuple(operation for operation in instruction if operation.kind in _FORWARD_ONLY)
            for instruction in self._training
        )
        self._validation = tuple(instruction for instruction in forwards if instruction)
        self.phases = programme_phases(self._training), programme_phases(self._validation)
        posts = receive_posts(schedule, stage)
        windows = receive_windows(self._training, posts, schedule, stage)
        self._posts = posts, posts_within(self._validation, windows, schedule, stage)

    def programme(self, forward_only: bool) -> tuple[Instruction, ...]:
        """What a step of training, or of validation, consists of."""
        return self._validation if forward_only else self._training

    def posts(self, forward_only: bool) -> tuple[tuple[int, ...], ...]:
        """[instruction] -> boundaries for which a receive is posted before it."""
        return self._posts[forward_only]

    def receives(self, forward_only: bool) -> dict[int, Iterator[Operation]]:
        """By boundary what is received over it in a step, in order."""
        found: dict[int, list[Operation]] = {}
        for instruction in self.programme(forward_only):
            for operation in instruction:
                if operation.kind in RECEIVES:
                    found.setdefault(self.message(operation).boundary, []).append(operation)
        return {boundary: iter(operations) for boundary, operations in found.items()}

    def message(self, operation: Operation) -> Message:
        return self.schedule.message(self.stage, operation)

    def last_gradients(self) -> set[Operation]:
        """For each chunk the operation with which its gradients are complete."""
        last = {
            operation.chunk: operation
            for instruction in self._training
            for operation in instruction
            if operation.kind in _GRADIENTS
        }
        return set(last.values())

    def run(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        seq_length: int,
        micro_batch_size: int,
        p2p_communicator: PipelineCommunicator,
        pg_collection: Any,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        adjust_tensor_shapes_fn: Callable[..., Any] | None = None,
        force_all_reduce: bool = False,
    ) -> list[Any]:
        """One step, with the arguments of Megatron's forward-backward functions.

        `model` is a list of model chunks, or the only one.  One of them at most reads data.

        Returns:
            What the loss function reported for each micro-batch, on the stage that has the loss.
        """
        if adjust_tensor_shapes_fn is not None:
            raise ValueError("adjust_tensor_shapes_fn is for models with several streams")
        chunks = list(model) if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        timers = config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        (shape,) = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=pg_collection.tp,
            cp_group=pg_collection.cp,
        )
        step = _Step(self, chunks, config, p2p_communicator.boundaries, shape, forward_only)

        def forward(chunk: int, k: int, received: torch.Tensor | None) -> Any:
            return schedules.forward_step(
                forward_step_func,
                data_iterator,
                chunks[chunk],
                self.schedule.num_micro_batches,
                [received],
                step.reports,
                config,
                cp_group_size=pg_collection.cp.size(),
                collect_non_loss_data=collect_non_loss_data,
                is_first_microbatch=schedules.check_first_val_step(
                    first_val_step, forward_only, k == 0
                ),
                current_microbatch=k,
                vp_stage=chunk if len(chunks) > 1 else None,
                is_last_stage=step.has_loss(chunk),
            )

        step.run(forward)
        if config.finalize_model_grads_func is not None and not forward_only:
            finishing_gradients(config.finalize_model_grads_func)(
                chunks,
                step.num_tokens if config.calculate_per_token_loss else None,
                pg_collection=pg_collection,
                force_all_reduce=force_all_reduce,
            )
        if getattr(config, "fine_grained_activation_offloading", False):
            FineGrainedActivationOffloadingInterface.reset()
        if timers is not None:
            timers("forward-backward").stop()
        return step.reports


Forward = Callable[[int, int, torch.Tensor | None], Any]
"""`forward(chunk, micro_batch, received)` -> ([output], number of tokens)."""

_Pass = tuple[str, int, int]
"""(kind of the message, chunk, micro-batch)."""


class _Step:
    """What is under way in one step: tensors between their passes, and what was reported."""

    def __init__(
        self,
        executor: Executor,
        chunks: Sequence[Any],
        config: Any,
        boundaries: Mapping[int, Boundary],
        shape: tuple[int, ...],
        forward_only: bool,
    ) -> None:
        self._executor, self._forward_only = executor, forward_only
        self._programme = executor.programme(forward_only)
        self._chunks, self._config = chunks, config
        self._boundaries, self._shape = boundaries, tuple(shape)
        self._has_own_lengths = bool(config.variable_seq_lengths)
        self._receives = executor.receives(forward_only)
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._inputs: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._outputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        # What has arrived, or is to be sent, until the operation that it is for.
        self._arrived: dict[_Pass, torch.Tensor] = {}
        self._to_send: dict[_Pass, torch.Tensor] = {}
        self._weights = WeightGradients()
        self.reports: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")

    def has_loss(self, chunk: int) -> bool:
        """Whether a chunk is the last of the chain."""
        schedule = self._executor.schedule
        return schedule.virtual_stage(self._executor.stage, chunk) == len(schedule.chain) - 1

    def run(self, forward: Forward) -> None:
        """Do all that the programme has up to the exchange of gradients."""
        for boundary in self._boundaries.values():
            boundary.begin()
        posts = self._executor.posts(self._forward_only)
        executor = self._executor
        off = GradientSyncOff(
            self._config, self._chunks, executor.stage == 0, executor.last_gradients()
        )
        with off as sync:
            phases = executor.phases[self._forward_only]
            for instruction, boundaries, own in zip(self._programme, posts, phases, strict=True):
                for number in boundaries:
                    self._post(number)
                for operation, phase in zip(instruction, own, strict=True):
                    PROGRESS.enter(Phase.VALIDATION if self._forward_only else phase)
                    if self._has_own_lengths:
                        for boundary in self._boundaries.values():
                            boundary.ask_for_announced()
                    if operation in sync.last_gradients:
                        sync.end(operation.chunk)
                    with self._executor.watched(operation.kind):
                        self._do(operation, forward)
            if not self._forward_only:
                sync.start_left()
        for boundary in self._boundaries.values():
            boundary.finish_sends()

    def _post(self, number: int) -> None:
        """Post for the next message over a boundary.

        Where lengths vary, an activation tells its own; its gradient has the same.
        """
        if not self._has_own_lengths:
            self._boundaries[number].post_receive(self._shape)
            return
        operation = next(self._receives[number])
        shape = None
        if operation.kind == "recv_backward":
            shape = self._shapes.pop((operation.chunk, operation.micro_batch))
        self._boundaries[number].post_receive(shape)

    def _do(self, operation: Operation, forward: Forward) -> None:
        k, chunk = operation.micro_batch, operation.chunk
        match operation.kind:
            case "forward":
                self._forward(chunk, k, forward)
            case "backward":
                self._backward(chunk, k)
            case "backward_input":
                with self._weights.putting_off(chunk, k):
                    self._backward(chunk, k)
            case "backward_weight":
                self._backward_weight(chunk, k)
            case "send_forward" | "send_backward":
                self._send(operation)
            case "recv_forward" | "recv_backward":
                self._receive(operation)
            case "gradient_sync" | "step":
                pass  # Megatron's loop does both once the schedule has returned.

    def _forward(self, chunk: int, k: int, forward: Forward) -> None:
        received = self._arrived.pop(("recv_forward", chunk, k), None)
        outputs, num_tokens = forward(chunk, k, received)
        self.num_tokens += num_tokens
        if not self.has_loss(chunk):
            self._to_send["send_forward", chunk, k] = outputs[0]
            self._shapes[chunk, k] = tuple(outputs[0].shape)
        if not self._forward_only:
            self._inputs[chunk, k], self._outputs[chunk, k] = [received], outputs

    def _backward(self, chunk: int, k: int) -> None:
        gradient = self._arrived.pop(("recv_backward", chunk, k), None)
        inputs, outputs = self._inputs.pop((chunk, k)), self._outputs.pop((chunk, k))
        (input_gradient,) = schedules.backward_step(inputs, outputs, [gradient], self._config)
        if input_gradient is not None:
            self._to_send["send_backward", chunk, k] = input_gradient

    def _backward_weight(self, chunk: int, k: int) -> None:
        timers = self._config.timers
        if timers is not None:
            timers("backward-compute", log_level=2).start()
        self._weights.make(chunk, k)
        if timers is not None:
            timers("backward-compute").stop()

    def _send(self, operation: Operation) -> None:
        kind, k, chunk = operation.kind, operation.micro_batch, operation.chunk
        message = self._executor.message(operation)
        self._boundaries[message.boundary].send(
            self._to_send.pop((kind, chunk, k)),
            announce=self._has_own_lengths and kind == "send_forward",
        )
        if kind == "send_forward" and not self._forward_only:
            # What was sent is kept by the boundary; of the output only its graph is still of use.
            schedules.deallocate_output_tensor(
                self._outputs[chunk, k][0], self._config.deallocate_pipeline_outputs
            )

    def _receive(self, operation: Operation) -> None:
        message = self._executor.message(operation)
        boundary = self._boundaries[message.boundary]
        key = (operation.kind, operation.chunk, operation.micro_batch)
        self._arrived[key] = boundary.take()
        if not self._forward_only:
            boundary.forget_sends(self._executor.arrived[message])
