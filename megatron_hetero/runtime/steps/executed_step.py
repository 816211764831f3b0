"""A step of a stage, operation by operation: passes by Megatron, messages by our boundaries.

Sends never hold up the stage.  Receives are posted as soon as their messages can be under way
(`schedule.orders.delivery`) and waited for where the programme has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules

from megatron_hetero.runtime.faults.progress import PROGRESS
from megatron_hetero.runtime.gradients.sync_off import DelayedSync
from megatron_hetero.runtime.gradients.weight_gradients import WeightGradients
from megatron_hetero.runtime.parallel.boundary import Boundary
from megatron_hetero.runtime.steps.stage_programme import StageProgramme
from megatron_hetero.schedule.programme import Operation

Forward = Callable[[int, int, torch.Tensor | None], Any]
"""`forward(chunk, micro_batch, received)` -> ([output], number of tokens)."""

_Pass = tuple[str, int, int]
"""(kind of the message, chunk, micro-batch)."""


class ExecutedStep:
    """State of one step: tensors between their passes, and the reports of the loss."""

    def __init__(
        self,
        stage: StageProgramme,
        chunks: Sequence[Any],
        config: Any,
        boundaries: Mapping[int, Boundary],
        shape: tuple[int, ...],
        forward_only: bool,
    ) -> None:
        self._stage, self._forward_only = stage, forward_only
        self._instructions = stage.instructions(forward_only)
        self._chunks, self._config = chunks, config
        self._boundaries, self._shape = boundaries, tuple(shape)
        self._has_own_lengths = bool(config.variable_seq_lengths)
        self._receives = stage.receives(forward_only)
        # (chunk, micro-batch) -> its activation's shape, and tensors between its passes.
        self._shapes: dict[tuple[int, int], tuple[int, ...]] = {}
        self._inputs: dict[tuple[int, int], list[torch.Tensor | None]] = {}
        self._outputs: dict[tuple[int, int], list[torch.Tensor]] = {}
        # What has arrived, or is to be sent, until the operation that it is for.
        self._arrived: dict[_Pass, torch.Tensor] = {}
        self._to_send: dict[_Pass, torch.Tensor] = {}
        self._weights = WeightGradients()
        self.reports: list[Any] = []
        self.num_tokens = torch.zeros([], dtype=torch.int, device="cuda")

    def run(self, forward: Forward, idle_rounds: Callable[[], None] | None = None) -> None:
        """Run all instructions of the programme, up to the exchange of gradients.

        Args:
            forward: Megatron's forward step.
            idle_rounds: gives this rank's parts of sharded layers for micro-batches that other
                replicas have left, if any has.  No gradients travel before: on a GPU a second
                bucket, behind one that waits for another replica, would hold up the parts of layers
                that this replica waits for.
        """
        # Boundaries first forget what the last step left.
        for boundary in self._boundaries.values():
            boundary.begin()
        stage = self._stage
        posts = stage.posts(self._forward_only)
        # Hold Megatron's own gradient sync back until gradients may travel.  Megatron sets
        # `grad_sync_func` under --align-grad-reduce alone.
        aligned = self._config.grad_sync_func is not None
        early = {} if idle_rounds else stage.early_gradients(aligned=aligned)
        with DelayedSync(self._config, self._chunks, early) as sync:
            phases = stage.phases(self._forward_only)
            # Instruction by instruction: post receives ahead, then run the operations.
            for instruction, boundaries, own in zip(self._instructions, posts, phases, strict=True):
                for number in boundaries:
                    self._post(number)
                for operation, phase in zip(instruction, own, strict=True):
                    PROGRESS.enter(phase)
                    # Shapes that were announced may have arrived: post the receives of their
                    # tensors.
                    if self._has_own_lengths:
                        for boundary in self._boundaries.values():
                            boundary.ask_for_announced()
                    sync.before(operation)
                    with stage.watched(operation.kind):
                        self.do(operation, forward)
            # Other replicas still run passes that need this rank's sharded weights.
            if idle_rounds is not None:
                idle_rounds()
            if not self._forward_only:
                sync.start_remaining()
        # Tensors sent are kept until they have arrived.
        for boundary in self._boundaries.values():
            boundary.finish_sends()

    def _post(self, number: int) -> None:
        """Post for the next message over a boundary.

        With unlike lengths an activation announces its shape; its gradient has the same one.
        """
        if not self._has_own_lengths:
            self._boundaries[number].post_receive(self._shape)
            return
        operation = next(self._receives[number])
        shape = None
        if operation.kind == "recv_backward":
            shape = self._shapes.pop((operation.chunk, operation.micro_batch))
        self._boundaries[number].post_receive(shape)

    def do(self, operation: Operation, forward: Forward) -> None:
        """Execute one operation of the programme."""
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
        # Nothing arrives at the first stage of the chain.
        received = self._arrived.pop(("recv_forward", chunk, k), None)
        outputs, num_tokens = forward(chunk, k, received)
        self.num_tokens += num_tokens
        if not self._stage.has_loss(chunk):
            self._to_send["send_forward", chunk, k] = outputs[0]
            self._shapes[chunk, k] = tuple(outputs[0].shape)
        # Validation keeps nothing, since no backward pass comes.
        if not self._forward_only:
            self._inputs[chunk, k], self._outputs[chunk, k] = [received], outputs

    def _backward(self, chunk: int, k: int) -> None:
        gradient = self._arrived.pop(("recv_backward", chunk, k), None)
        inputs, outputs = self._inputs.pop((chunk, k)), self._outputs.pop((chunk, k))
        (input_gradient,) = schedules.backward_step(inputs, outputs, [gradient], self._config)
        # The first stage of the chain has no input that wants a gradient.
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
        message = self._stage.message(operation)
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
        message = self._stage.message(operation)
        boundary = self._boundaries[message.boundary]
        key = (operation.kind, operation.chunk, operation.micro_batch)
        self._arrived[key] = boundary.take()
        # Whoever sent this had some of our messages before: their memory is free.
        if not self._forward_only:
            boundary.forget_sends(self._stage.arrived[message])
