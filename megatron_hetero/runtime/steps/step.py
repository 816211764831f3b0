"""A step of a replica: the replica's part of the job's micro-batches, through the executor.

Megatron's loop calls `ReplicaSchedule` as it would call the schedule itself, with the whole job's
number of micro-batches, and gets back one report for the whole job.  So what it logs (losses of
training, validation and test) needs no data-parallel group of Megatron's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config
from megatron.training import get_args

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.flags.support.rules import is_packed
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.batches import BatchSchedule, global_batch_size
from megatron_hetero.runtime.faults.marks import begin_step
from megatron_hetero.runtime.gradients import weight_gradients
from megatron_hetero.runtime.observe.stage_ratio import StageWatch
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.steps.executor import Executor
from megatron_hetero.schedule.of_plan import replica_schedule


def _idle_rounds(plan: Plan, groups: RankGroups) -> int | None:
    """Count the micro-batches in which this replica only gives parts of sharded layers; None where
    no replica has idle rounds."""
    if not plan.layout.has_idle_rounds:
        return None
    counts = [replica.num_micro_batches for replica in plan.replicas]
    return max(counts) - counts[groups.position.replica]


class ReplicaSchedule:
    """Substitute for Megatron's forward-backward functions; `batches` are the whole job's."""

    def __init__(
        self, batches: BatchSchedule, groups: RankGroups, watch: StageWatch | None = None
    ) -> None:
        self._groups = groups
        watched = None if watch is None else watch.watched
        place = groups.context_place
        own_tokens = None if place is None else place.tokens[place.rank]
        self._executors: dict[tuple[int, bool], Executor] = {}
        # Executors by (sequences of a step, validation or not).
        steps = [(plan, False) for plan in batches.plans]
        for plan, forward_only in (*steps, (batches.of_validation, True)):
            key = global_batch_size(plan), forward_only
            if key in self._executors:
                continue
            schedule = replica_schedule(plan, groups.position.replica)
            # Weight gradients can be put off only once Megatron's linear layers are prepared.
            if any(o.kind == "backward_weight" for p in schedule.programmes for i in p for o in i):
                weight_gradients.activate()
            executor = Executor(
                schedule,
                groups.pipeline.stage,
                watched,
                _idle_rounds(plan, groups),
                own_tokens,
                is_packed(get_args()),
                groups.messages_under_way,
            )
            self._executors[key] = executor

    def __call__(
        self,
        *,
        num_microbatches: int,
        micro_batch_size: int,
        collect_non_loss_data: bool = False,
        **kwargs: Any,
    ) -> list[dict[str, torch.Tensor]]:
        """Run the replica's part of a step.

        Args:
            num_microbatches: the job's number, in micro-batches of this replica's size.
            micro_batch_size: sequences in a micro-batch of this replica.
            collect_non_loss_data: as in Megatron.
            kwargs: further arguments of Megatron's forward-backward functions.
        Returns:
            On last stages one report, `{key: [sum, tokens]}` over the whole job, in a list as in
            Megatron; on other stages an empty list.
        """
        # The plan has an executor for its batch of training and for that of validation.
        forward_only = bool(kwargs.get("forward_only", False))
        key = num_microbatches * micro_batch_size, forward_only
        if key not in self._executors:
            allowed = [str(size) for size, only in self._executors if only == forward_only]
            raise UsageError(
                f"this step has {key[0]} sequences, the plan's replicas together "
                f"{' or '.join(allowed)}; it must stay the plan's."
            )
        # Context-parallel ranks count tokens together.
        if self._groups.context.size() > 1:
            kwargs["forward_step_func"] = whole_counts(
                kwargs["forward_step_func"], kwargs["model"], self._groups.context
            )
        begin_step(forward_only)
        args = get_args()
        # Ranks that read no batch make room for one of this size; validation may have its own.
        trained, args.micro_batch_size = args.micro_batch_size, micro_batch_size
        reports = self._executors[key].run(
            micro_batch_size=micro_batch_size,
            collect_non_loss_data=collect_non_loss_data,
            **kwargs,
        )
        args.micro_batch_size = trained
        # Only last stages have losses; they sum them over the job.
        if collect_non_loss_data or not self._groups.is_last_stage:
            return reports
        if forward_only and args.sft:
            # Of conversations Megatron's validation takes the mean over micro-batches.
            reports = [{key: _mean_of(r[key]) for key in r} for r in reports]
        return [job_report(reports, self._groups)]


def job_report(
    reports: list[dict[str, torch.Tensor]], groups: RankGroups
) -> dict[str, torch.Tensor]:
    """Sum the reports of all micro-batches of all replicas.  Collective on last stages.

    The ranks of a tensor-parallel group have equal reports, so the first one counts.
    """
    total = {}
    for key in reports[0]:
        values = [report[key].view(-1) for report in reports]
        if values[0].numel() != 2:
            raise UnsupportedError(
                f"the loss function reports {key!r} as {values[0].numel()} value(s); it must "
                "return [sum of losses, number of tokens], because replicas see unlike numbers "
                "of tokens."
            )
        total[key] = torch.vstack(values).sum(dim=0)
        if groups.tensor.rank() != 0:
            total[key].zero_()
        dist.all_reduce(total[key], group=groups.last_stages)
    return total


def _mean_of(report: torch.Tensor) -> torch.Tensor:
    """Turn a micro-batch's [sum, tokens] into [mean, 1]."""
    total, count = report.view(-1).tolist()
    return report.new_tensor([total / max(count, 1), 1.0])


def whole_counts(
    forward_step_func: Callable[..., Any], model: Any, context: dist.ProcessGroup
) -> Callable[..., Any]:
    """Return a forward step whose loss is divided by the tokens of the whole micro-batch.

    Megatron divides a micro-batch's loss by its tokens that count. Where each context-parallel rank
    has some of them, they are counted together; the parts of the gradient then sum to the gradient
    of one rank. With `--calculate-per-token-loss` nothing is divided before the end of the step,
    and each rank counts its own tokens.

    Args:
        forward_step_func: the script's forward step.
        model: the model, or the list of its chunks.
        context: the context-parallel group.
    """
    # Per-token losses are divided at the end of the step: nothing to do here.
    config = get_model_config(model[0] if isinstance(model, list) else model)
    if config.calculate_per_token_loss:
        return forward_step_func

    def forward_step(*given: Any) -> tuple[torch.Tensor, Any]:
        output, loss_func = forward_step_func(*given)

        # The script's loss function, with the count of the whole micro-batch in place of this
        # rank's.
        def counted(*args: Any, **kwargs: Any) -> Any:
            found = loss_func(*args, **kwargs)
            if kwargs.get("non_loss_data"):
                return found
            if len(found) != 3:
                raise UnsupportedError(
                    "the loss function returns no number of tokens, so that context-parallel ranks "
                    "cannot be weighted; return (sum of losses, number of tokens, report)."
                )
            loss, num_tokens, report = found
            whole = num_tokens.clone()
            dist.all_reduce(whole, group=context)
            return loss, whole, report

        return output, counted

    return forward_step
