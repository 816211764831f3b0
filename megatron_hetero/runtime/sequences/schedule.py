"""One step in Megatron's loop: a rank's micro-batches of a dealt step, through the executor.

The programme is 1F1B, with the launch counts of the plan; only the number of micro-batches changes
from step to step.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any

import torch

from megatron_hetero.errors import UsageError
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.faults.marks import begin_step
from megatron_hetero.runtime.model import gpt
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.sequences.balance import Balance
from megatron_hetero.runtime.sequences.own_batch import OwnBatch
from megatron_hetero.runtime.sequences.steps import RankStep
from megatron_hetero.runtime.steps.executor import Executor
from megatron_hetero.runtime.steps.step import job_report
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.sequences.replica_groups import launch_counts


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch of a dealt step; as `runtime.model.gpt.forward_step`.

    Returns:
        Per-token losses `[1, own tokens]`, and the loss function for them.
    """
    batch: OwnBatch = next(data_iterator)
    output = model(
        batch.tokens,
        batch.position_ids,
        None,
        labels=batch.labels,
        loss_mask=batch.loss_mask,
        packed_seq_params=batch.sequences,
    )
    return output, partial(gpt.loss_func, batch.loss_mask)


class DealtSchedule:
    """Substitute for Megatron's forward-backward functions."""

    def __init__(self, plan: Plan, groups: RankGroups, balance: Balance) -> None:
        self._groups, self._balance = groups, balance
        self._counts = launch_counts(plan.replicas[groups.position.replica])
        # Steps have few different numbers of micro-batches, so executors are kept.
        self._executor = lru_cache(maxsize=64)(self._new_executor)

    def _new_executor(self, num_micro_batches: int) -> Executor:
        schedule = one_f_one_b(len(self._counts), num_micro_batches, self._counts)
        return Executor(
            schedule,
            self._groups.pipeline.stage,
            self._balance.watched,
            most_posted=self._groups.messages_under_way,
        )

    def __call__(
        self,
        *,
        data_iterator: Any,
        num_microbatches: int,
        micro_batch_size: int,
        collect_non_loss_data: bool = False,
        **kwargs: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Run this rank's part of a step.

        Args:
            data_iterator: of `RankStep`.
            num_microbatches: times `micro_batch_size` the documents of the step.
            micro_batch_size: as Megatron counts; a dealt micro-batch has any number.
            collect_non_loss_data: as in Megatron.
            kwargs: further arguments of Megatron's forward-backward functions.
        Returns:
            As `runtime.steps.step.ReplicaSchedule`.
        """
        forward_only = bool(kwargs.get("forward_only", False))
        begin_step(forward_only)
        # The data hand over a dealt step whole; Megatron's count of sequences must be its own.
        step: RankStep = next(data_iterator)
        if step.num_sequences != num_microbatches * micro_batch_size:
            raise UsageError(
                f"this step has {num_microbatches * micro_batch_size} sequences, the data "
                f"{step.num_sequences}; batches stay as they are with --hetero-sequences"
            )
        # Run the rank's micro-batches, with the clock of the balance line.
        with self._balance.measured(step, forward_only):
            reports = self._executor(len(step.batches)).run(
                data_iterator=iter(step.batches),
                micro_batch_size=micro_batch_size,
                collect_non_loss_data=collect_non_loss_data,
                **kwargs,
            )
        if collect_non_loss_data or not self._groups.is_last_stage:
            return reports
        return [job_report(reports, self._groups)]
