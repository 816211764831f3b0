"""The proof that steps of dealt sequences end under NCCL's rules.

Replicas that divide a sequence exchange keys and values, or heads, in each pass of its micro-batch;
every step has other groups.  Two facts let few steps stand for all:

* Where some group divides sequences, all replicas run the step's micro-batches in one order and
  none leaves one out (`StepTokens.of_rank`), and replicas of a group are alike, in their launch
  counts too.  So the replicas of a group come to each micro-batch with the same programme, and
  every rank meets the groups in the order of the passes, which is one order for all.
* Groups are nested or apart (`GroupTree`), so a step only chooses which of the groups of a rank
  each micro-batch has; `every_group_dealt` has every group, each beside the others.
"""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.proof.check import check_operations
from megatron_hetero.schedule.proof.of_plan import How
from megatron_hetero.sequences.replica_groups import launch_counts
from megatron_hetero.sequences.tree import GroupTree


def every_group_dealt(plan: Plan, tree: GroupTree) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return `How.dealt` of a step that has all groups of a job in turn, again and again until the
    pipelines are full; empty where no group divides sequences.

    Args:
        plan: of the job.
        tree: its groups.
    """
    # Groups of one rank exchange nothing, and groups without a price are never used.
    groups = [
        (group.first, group.stop)
        for group in tree.groups
        if group.stop - group.first > 1 and tree.kinds[group.kind].prices
    ]
    if not groups:
        return ()
    most = max(count for replica in plan.replicas for count in launch_counts(replica))
    # Twice through all groups, and as many turns as the deepest pipeline has in flight.
    turns = groups * (2 + most // len(groups))
    # [replica][micro-batch] -> the replicas of the group: the turn's, or the replica alone.
    return tuple(
        tuple((first, stop) if first <= r < stop else (r, r + 1) for first, stop in turns)
        for r in range(len(plan.replicas))
    )


def check_dealt_steps(plan: Plan, workload: Workload, tree: GroupTree, *, aligned: bool) -> None:
    """Prove for a job of dealt sequences that its steps end.

    Args:
        plan: validated.
        workload: its model and training.
        tree: its groups.
        aligned: `--align-grad-reduce`.
    Raises:
        PlanFormatError: as `check_operations`.
    """
    # First without any divided sequence, as in a step of short ones.
    how = How(variable_lengths=True, aligned=aligned)
    check_operations(plan, workload, how)
    dealt = every_group_dealt(plan, tree)
    if dealt:
        count = len(dealt[0])
        full = tuple(replace(replica, num_micro_batches=count) for replica in plan.replicas)
        check_operations(replace(plan, replicas=full), workload, replace(how, dealt=dealt))
