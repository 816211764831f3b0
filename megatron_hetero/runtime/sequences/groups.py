"""Process groups of the nested groups of ranks, made once before training."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

import torch.distributed as dist

from megatron_hetero.sequences.tree import GroupTree


def nested_groups(
    tree: GroupTree, alone: dist.ProcessGroup, timeout: timedelta
) -> Mapping[tuple[int, int], dist.ProcessGroup]:
    """Create a process group for each group of a job.  Collective: every rank calls it with equal
    trees, and makes all groups in one order.

    Args:
        tree: the groups of the job.
        alone: the group of this rank alone.
        timeout: limit of every collective.
    Returns:
        (first rank, rank behind the last) -> the group, for those that this rank is in.
    """
    rank = dist.get_rank()
    found: dict[tuple[int, int], dist.ProcessGroup] = {(rank, rank + 1): alone}
    for group in tree.groups:
        if group.stop - group.first < 2:
            continue
        ranks = list(range(group.first, group.stop))
        is_world = len(ranks) == dist.get_world_size()
        made = dist.group.WORLD if is_world else dist.new_group(ranks, timeout=timeout)
        if rank in ranks:
            found[group.first, group.stop] = made
    return found
