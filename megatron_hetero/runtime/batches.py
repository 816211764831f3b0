"""Division of a global batch among replicas, also of a batch that grows during training.

`--step-batch-size-schedule` is Megatron's (0.19 ignores `--rampup-batch-size`). A plan divides its
own batch among its replicas. An earlier, smaller batch is divided in the same proportion: each
replica runs the same part of its micro-batches, which has to be a whole number. Weights of
gradients, the division of the optimizer's state and everything else that is not counted in
micro-batches therefore stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.plan.plan import Plan, Replica


def with_micro_batch_sizes(plan: Plan, job_micro_batch_size: int) -> Plan:
    """Return the plan with each replica's micro-batch size written out, the job's by default."""
    replicas = tuple(
        replace(r, micro_batch_size=r.micro_batch_size or job_micro_batch_size)
        for r in plan.replicas
    )
    return replace(plan, replicas=replicas)


def micro_batch_sizes(plan: Plan) -> tuple[int, ...]:
    """Return, for each replica, the samples in a micro-batch of a plan `with_micro_batch_sizes`.

    Raises:
        ValueError: a replica has no size written out.
    """
    sizes = tuple(r.micro_batch_size for r in plan.replicas if r.micro_batch_size is not None)
    if len(sizes) != len(plan.replicas):
        raise ValueError("a replica has no micro-batch size; use with_micro_batch_sizes")
    return sizes


def global_batch_size(plan: Plan) -> int:
    """Count the samples in a step of a plan `with_micro_batch_sizes`."""
    sizes = micro_batch_sizes(plan)
    return sum(r.num_micro_batches * s for r, s in zip(plan.replicas, sizes, strict=True))


def deal(counts: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[range, ...], ...]:
    """Deal the samples of a global batch out to replicas, one micro-batch each in turn.

    Args:
        counts: micro-batches of each replica.
        sizes: samples in a micro-batch of each replica.
    Returns:
        [replica] -> the samples of each of its micro-batches, numbered from the batch's first.
    """
    dealt: list[list[range]] = [[] for _ in counts]
    start = 0
    for round_ in range(max(counts)):
        for replica, (count, size) in enumerate(zip(counts, sizes, strict=True)):
            if round_ < count:
                dealt[replica].append(range(start, start + size))
                start += size
    return tuple(tuple(batches) for batches in dealt)


@dataclass(frozen=True)
class BatchSchedule:
    """Plans of a job with growing batches.

    `steps` are (first sample, the plan with its counts from there on), in order, from 0.
    `validation` is the plan of validation; None is that of the last step.
    """

    steps: tuple[tuple[int, Plan], ...]
    validation: Plan | None = None

    @classmethod
    def constant(cls, plan: Plan) -> BatchSchedule:
        """Return a schedule of one batch from the first step to the last."""
        return cls(((0, plan),))

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(plan for _, plan in self.steps)

    @property
    def of_validation(self) -> Plan:
        """Return the plan for validation batches."""
        return self.validation or self.plans[-1]

    def plan_at(self, consumed: int) -> Plan:
        """Return the plan of the step that begins after `consumed` samples."""
        return next(plan for first, plan in reversed(self.steps) if first <= consumed)


def batch_schedule(text: str, seq_length: int, plan: Plan) -> BatchSchedule:
    """Read `--step-batch-size-schedule` for a plan `with_micro_batch_sizes`.

    Args:
        text: "TOKENS:BATCH TOKENS:BATCH ...", as Megatron reads it (with a sequence length it takes
            thresholds for tokens).
        seq_length: tokens of a sequence.
        plan: the plan of the last batch.
    Raises:
        UsageError: Megatron cannot read the text, or its last batch is not the plan's.
        UnsupportedError: a batch does not divide among the replicas as the plan's does.
    """
    from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

    try:
        # Only the reading of the text is wanted: rank and sizes are placeholders.
        read = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, seq_length).schedule
    except (AssertionError, ValueError) as error:
        raise UsageError(f"--step-batch-size-schedule {text!r}: {error}") from error
    last = read[-1][1]
    if last != global_batch_size(plan):
        raise UsageError(
            f"--step-batch-size-schedule {text!r} ends with a batch of {last} sequences, the plan "
            f"has {global_batch_size(plan)}. Plan for the last batch of the schedule."
        )
    return BatchSchedule(tuple((first, with_batch(plan, batch)) for first, batch in read))


def with_micro_batches(plan: Plan, size: int, job_size: int) -> Plan:
    """Return the plan with micro-batches of another size, each replica's as many times larger as
    the job's (`--eval-micro-batch-size`).

    Args:
        plan: a plan `with_micro_batch_sizes`.
        size: the job's new size, in sequences.
        job_size: the job's size in the plan.
    Raises:
        UnsupportedError: a replica would have a fraction of a sequence, or of a micro-batch; the
            message names it.
    """
    flag, replicas = "--eval-micro-batch-size", []
    for r, (replica, old) in enumerate(zip(plan.replicas, micro_batch_sizes(plan), strict=True)):
        if any(stage.order is not None for stage in replica.stages):
            raise UnsupportedError(f"{flag}: {_MADE_FOR_ITS_NUMBER.format(r)}")
        # The replica's samples stay the same; only their division into micro-batches changes.
        own, rest = divmod(old * size, job_size)
        count, left = divmod(replica.num_micro_batches * job_size, size)
        if rest or left or not count:
            raise UnsupportedError(
                f"{flag} {size}: replica {r} runs {replica.num_micro_batches} micro-batches of "
                f"{old}, which cannot be made {job_size}/{size} as many. Choose a size of which "
                f"both {old} * {size}/{job_size} and {replica.num_micro_batches} * "
                f"{job_size}/{size} are whole numbers."
            )
        replicas.append(_with_count(replace(replica, micro_batch_size=own), count))
    return replace(plan, replicas=tuple(replicas))


_MADE_FOR_ITS_NUMBER = (
    "replica {} has orders of computations that are made for its number of micro-batches. Use a "
    "plan with 1F1B."
)


def _with_count(replica: Replica, count: int) -> Replica:
    """Return a replica that runs `count` micro-batches, and launches no more ahead."""
    stages = tuple(
        replace(stage, num_launched_forwards=min(stage.num_launched_forwards, count))
        if stage.num_launched_forwards is not None
        else stage
        for stage in replica.stages
    )
    return replace(replica, num_micro_batches=count, stages=stages)


def with_batch(plan: Plan, batch: int, flag: str = "--step-batch-size-schedule") -> Plan:
    """Return the plan with a new batch, the replicas' parts in proportion.

    Raises:
        UnsupportedError: a replica would run a fractional number of micro-batches; the message
            names it.
    """
    whole = global_batch_size(plan)
    if batch == whole:
        return plan
    replicas = []
    for r, replica in enumerate(plan.replicas):
        if any(stage.order is not None for stage in replica.stages):
            raise UnsupportedError(f"{flag}: {_MADE_FOR_ITS_NUMBER.format(r)}")
        count, rest = divmod(replica.num_micro_batches * batch, whole)
        if rest:
            raise UnsupportedError(
                f"{flag}: a batch of {batch} leaves replica {r} "
                f"{replica.num_micro_batches} * {batch}/{whole} micro-batches, which is no whole "
                f"number. Choose batches of which {batch}/{whole} of every replica's micro-batches "
                f"({', '.join(str(x.num_micro_batches) for x in plan.replicas)}) is one."
            )
        if batch % (replica.micro_batch_size or 1):
            raise UnsupportedError(
                f"{flag}: a batch of {batch} is no multiple of replica {r}'s "
                f"micro-batches of {replica.micro_batch_size} sequences (Megatron counts in them)."
            )
        replicas.append(_with_count(replica, count))
    return replace(plan, replicas=tuple(replicas))
