"""Whether all operations of a plan end under NCCL's rules, told by a few of its replicas."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import gcd

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.workload import divided_sizes
from megatron_hetero.plan.plan import Plan, StageShape
from megatron_hetero.schedule.proof.circle import describe
from megatron_hetero.schedule.proof.gradients import ALL_LATE
from megatron_hetero.schedule.proof.of_plan import How, PlanOperations, job_operations
from megatron_hetero.schedule.proof.rules import blocked_ranks
from megatron_hetero.schedule.stock import is_stock


def check_operations(
    plan: Plan, workload: Workload, how: How | None = None, source: str = ""
) -> None:
    """Prove for a plan in our runtime that all operations end under NCCL's rules.

    Args:
        plan: validated.
        workload: its model and training.
        how: what else decides them.
        source: the plan's file, where there is one; the message begins with it.
    Raises:
        PlanFormatError: they do not; the message names the ranks that wait for each other.
    """
    # Stock Megatron's operations are not ours to prove.
    if is_stock(plan):
        return
    # Two replicas of each kind, and two blocks of all stages, show if there is a deadlock at all;
    # all gradients within the passes, and none, stand for the numbers between them
    # (`schedule.orders.early_gradients`).
    how = how or How()
    fewer = plan if how.dealt else _of_narrow_stages(_of_each_kind(plan), workload)
    few = PlanOperations(fewer, workload, how)
    all_late = (ALL_LATE,) if workload.training.overlap_grad_reduce else ()
    for late in (how.deepest_late, *all_late):
        if not blocked_ranks(few.operations(late)):
            continue
        # If they hang, prove it on the whole plan, for the message to name its true ranks.
        job = job_operations(plan, workload, replace(how, deepest_late=late))
        blocked = blocked_ranks(job)
        if blocked:
            where = f"{source}: " if source else ""
            raise PlanFormatError(
                f"{where}on GPUs this plan hangs; each rank waits for the next:\n"
                f"{describe(job, blocked)}"
            )


def _of_narrow_stages(plan: Plan, workload: Workload) -> Plan:
    """Return a plan with all widths divided by a common number; the narrower plan hangs if and only
    if the other does.

    The ranks of every stage form as many blocks, which hold equal parts of everything.  To exchange
    two blocks on all stages changes no rank's list but for the names of ranks and groups.  The
    state in which nobody can go on is one, so all blocks end alike, and two of them stand for all:
    groups of one block stay apart from groups of several.
    """
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    widths = {stage.shape.tensor_parallel for stage in stages}
    common = gcd(*widths)
    # Two blocks have as many communicators on each rank as more have, so streams are shared alike.
    number = common // min(d for d in range(2, common + 1) if not common % d) if common > 1 else 1
    is_plain = not any(
        s.shape != StageShape(s.shape.tensor_parallel, s.shape.num_layers) for s in stages
    )
    if number == 1 or not is_plain or plan.exchange_groups or workload.model.num_experts:
        return plan
    # Blocks are equal where every width divides what tensor parallelism divides.
    model = workload.model
    parts = [units for *_, units in divided_sizes(model)] + [model.hidden_size, model.seq_length]
    if any(units % width for units in parts for width in widths):
        return plan
    replicas = []
    for replica in plan.replicas:
        own = []
        for stage in replica.stages:
            width = stage.shape.tensor_parallel // number
            shape = replace(stage.shape, tensor_parallel=width)
            own.append(replace(stage, shape=shape, devices=()))
        replicas.append(replace(replica, stages=tuple(own)))
    return replace(plan, replicas=tuple(replicas), hosts=(), estimates=None)


def _of_each_kind(plan: Plan) -> Plan:
    """Return a plan with two replicas of each kind; the smaller plan hangs if and only if the whole
    one does.

    Replicas of one kind give the library the same operations, and each set of ranks that exchanges
    gradients has of all of them those in the same place; so any two of them stand where any other
    two do.  An exchange by groups of machines is not alike for all, and groups of experts take more
    replicas than two, so then all replicas stay.
    """
    if plan.exchange_groups or plan.layout.has_expert_groups:
        return plan
    # Two replicas that differ in devices and optimizer shares alone are of one kind.
    counts: Counter[object] = Counter()
    kept = []
    for replica in plan.replicas:
        stages = tuple(replace(s, devices=(), optimizer_share=None) for s in replica.stages)
        kind = stages, replica.num_micro_batches, replica.micro_batch_size
        counts[kind] += 1
        if counts[kind] <= 2:
            kept.append(replica)
    if len(kept) == len(plan.replicas):
        return plan
    return replace(plan, replicas=tuple(kept), hosts=(), estimates=None)
