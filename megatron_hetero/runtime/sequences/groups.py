"""Process groups of the nested groups of replicas, made once before training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.parallel.connecting import ALL_TO_ALL, make_group
from megatron_hetero.sequences.replica_groups import replica_ranks
from megatron_hetero.sequences.tree import GroupTree


@dataclass(frozen=True)
class GroupPlace:
    """The place of a rank among the groups of a job.

    Attributes:
        replica: of the rank, by which groups and dealt steps name it.
        num_replicas: of the job.
        num_stages: of its replica.
        groups: (first replica, replica behind the last) -> the process group of the ranks that have
            in these replicas the place that this one has in its own.
        multiple: of which the tokens of every rank are one in each micro-batch.
    """

    replica: int
    num_replicas: int
    num_stages: int
    groups: Mapping[tuple[int, int], dist.ProcessGroup]
    multiple: int = 1


def nested_groups(
    tree: GroupTree, plan: Plan, alone: dist.ProcessGroup, timeout: timedelta
) -> Mapping[tuple[int, int], dist.ProcessGroup]:
    """Create the process groups of a job: for each group of replicas that may divide a sequence,
    one for each place in them.  Collective: every rank calls it with equal trees, and makes all
    groups in one order.

    Args:
        tree: the groups of the job.
        plan: whose replicas they are.
        alone: the group of this rank alone.
        timeout: limit of every collective.
    Returns:
        `GroupPlace.groups` of this rank.
    """
    rank, ranks_of = dist.get_rank(), replica_ranks(plan)
    # This rank's replica alone is a group of one.
    own = next(r for r, ranks in enumerate(ranks_of) if rank in ranks)
    found: dict[tuple[int, int], dist.ProcessGroup] = {(own, own + 1): alone}
    # Only groups of several replicas whose kind has a price can be dealt a sequence.
    for group in tree.groups:
        if group.stop - group.first < 2 or not tree.kinds[group.kind].prices:
            continue
        # One process group for each place in the replicas; the whole world has one already.
        for column in zip(*ranks_of[group.first : group.stop], strict=True):
            is_world = len(column) == dist.get_world_size()
            if is_world:
                made = dist.group.WORLD
            else:
                made = make_group(column, timeout, "replicas that divide sequences", ALL_TO_ALL)
            if rank in column:
                found[group.first, group.stop] = made
    return found
