"""Execution of a stage's programme by Megatron's own forward and backward steps.

The programme says which operation is due when (`schedule.programme`). The forward and backward
steps stay Megatron's (`forward_step`, `backward_step` of
`megatron.core.pipeline_parallel.schedules`), and so does everything that its schedules do around
them: the report of losses, the count of tokens, `no_sync` until the last gradient of a model chunk,
`finalize_model_grads_func`, timers, and validation, which runs only the forwards of the programme.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
    FineGrainedActivationOffloadingInterface,
)
from megatron.core.utils import get_model_config

from megatron_hetero.runtime.faults.marks import finishing_gradients
from megatron_hetero.runtime.gradients.sync import gradient_sync
from megatron_hetero.runtime.parallel.pipeline import PipelineCommunicator
from megatron_hetero.runtime.steps.executed_step import ExecutedStep
from megatron_hetero.runtime.steps.stage_programme import StageProgramme
from megatron_hetero.schedule.programme import Schedule


class Executor:
    """Executor of stage `stage` of `schedule`, one call of `run` for each step."""

    def __init__(
        self,
        schedule: Schedule,
        stage: int,
        watched: Callable[[str], AbstractContextManager[None]] | None = None,
        num_idle_rounds: int | None = None,
        own_tokens: int | None = None,
        is_packed: bool = False,
        most_posted: Mapping[int, int] | None = None,
    ) -> None:
        """Prepare the programme of the stage.

        Args:
            schedule: the schedule of the replica.
            stage: index of the stage in it.
            watched: `watched(kind)` is entered around every operation
                (see `runtime.observe.stage_ratio`).
            num_idle_rounds: micro-batches that other replicas have and this one has not, in which
                it gives its parts of sharded layers; None where no replica has any.
            own_tokens: of a sequence, on this rank of a stage with unlike shares of them.
            is_packed: the sequences of a micro-batch follow one another in one.
            most_posted: as of `StageProgramme`.
        """
        self._num_idle_rounds, self._own_tokens = num_idle_rounds, own_tokens
        self._is_packed = is_packed
        self._stage = StageProgramme(schedule, stage, watched, most_posted)

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
        """Run one step, with the arguments of Megatron's forward-backward functions.

        `model` is a list of model chunks, or the only one. At most one of them reads data.

        Returns:
            The loss function's report for each micro-batch, on the stage that has the loss.
        """
        # Megatron's arguments in the form that a step needs.
        if adjust_tensor_shapes_fn is not None:
            raise ValueError("adjust_tensor_shapes_fn is for models with several streams")
        chunks = list(model) if isinstance(model, list) else [model]
        config = get_model_config(chunks[0])
        timers = config.timers
        if timers is not None:
            timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
        # Packed sequences of a micro-batch are one long sequence.
        if self._is_packed:
            seq_length, micro_batch_size = seq_length * micro_batch_size, 1
        # The shape of an activation on this rank, by Megatron's rule or by unlike shares of the
        # sequence.
        (shape,) = schedules.get_tensor_shapes(
            seq_length=seq_length,
            micro_batch_size=micro_batch_size,
            decoder_seq_length=decoder_seq_length,
            config=config,
            tp_group=pg_collection.tp,
            cp_group=pg_collection.cp,
        )
        if self._own_tokens is not None:
            width = pg_collection.tp.size() if config.sequence_parallel else 1
            shape = (self._own_tokens // width, *shape[1:])
        # The step runs the programme; forward passes are Megatron's.
        step = ExecutedStep(
            self._stage, chunks, config, p2p_communicator.boundaries, shape, forward_only
        )

        def forward(chunk: int, k: int, received: torch.Tensor | None) -> Any:
            return schedules.forward_step(
                forward_step_func,
                data_iterator,
                chunks[chunk],
                self._stage.schedule.num_micro_batches,
                [received],
                step.reports,
                config,
                # Gradients of context-parallel ranks are summed, where Megatron takes their mean:
                # losses of experts, like the others, are the parts of a sum.
                cp_group_size=1,
                collect_non_loss_data=collect_non_loss_data,
                is_first_microbatch=schedules.check_first_val_step(
                    first_val_step, forward_only, k == 0
                ),
                current_microbatch=k,
                vp_stage=chunk if len(chunks) > 1 else None,
                is_last_stage=self._stage.has_loss(chunk),
            )

        # Replicas with fewer micro-batches give sharded weights for the rest.
        sync, number = gradient_sync(config), self._num_idle_rounds
        idle_rounds: Callable[[], None] | None = None
        if sync is not None and number is not None:
            idle_rounds = partial(sync.sharded.idle_rounds, number, forward_only=forward_only)
        step.run(forward, idle_rounds)
        # Gradients are complete: exchange what is left, and scale.
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
