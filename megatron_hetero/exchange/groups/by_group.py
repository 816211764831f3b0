"""Exchanges that reduce inside machines, then inside groups of machines, then between the groups.

A plan names groups of machines that are near to each other (`Plan.exchange_groups`).  What crosses
between two groups is then the sum of each, once, and not what a ring over all holders hands on.
Where the plan gives the machines' uplinks, machines and groups own parts that suit them; else they
own equal parts.  The planner's prices, the simulation and the runtime make their exchanges here.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import floor

from megatron_hetero.exchange.groups.grouping import Grouping, even, grouped_plan
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose
from megatron_hetero.exchange.shares import balanced_shares


def plan_by_group(
    machines: Sequence[str],
    groups: Sequence[Sequence[str]],
    size: int,
    purpose: Purpose,
    owners: Sequence[Owned] | None = None,
    uplinks: Sequence[Sequence[int]] = (),
) -> ExchangePlan | None:
    """Make the exchange of some holders; None where they are all in one group, which has no other
    exchange than without groups.

    Args:
        machines: [holder] -> its machine, which is in one of the groups.
        groups: names of machines.
        size: elements of the buffer, > 0.
        purpose: all-reduce, reduce-scatter or all-gather.
        owners: of all elements, where they are given; else members own parts.
        uplinks: relative bandwidth of each machine of the groups (`Plan.exchange_uplinks`); empty
            is equal parts.
    """
    grouping = grouping_of(machines, groups, uplinks)
    return None if grouping is None else grouped_plan("by groups", purpose, size, grouping, owners)


def grouping_of(
    machines: Sequence[str],
    groups: Sequence[Sequence[str]],
    uplinks: Sequence[Sequence[int]] = (),
) -> Grouping | None:
    """Return who of some holders reduces with whom first; arguments and None as `plan_by_group`."""
    group_of = {machine: number for number, group in enumerate(groups) for machine in group}
    # Group -> machine -> holders; machines keep the order in which holders name them.
    found: dict[int, dict[str, list[int]]] = {}
    for holder, machine in enumerate(machines):
        found.setdefault(group_of[machine], {}).setdefault(machine, []).append(holder)
    # All in one group: nothing crosses between groups.
    if len(found) < 2:
        return None
    uplink_of = dict(zip(chain(*groups), chain(*uplinks), strict=True)) if uplinks else {}
    members, bandwidths = [], []
    for _, of_machines in sorted(found.items()):
        # Without uplinks, all machines count alike.
        own = [uplink_of.get(machine, 1) for machine in of_machines]
        members.append(_joined([_joined(holders) for holders in of_machines.values()], own))
        bandwidths.append(sum(own) if uplinks else 1)
    # Two groups send each other the buffer once, whatever each of them owns.
    return _grouping(members, () if len(members) == 2 else bandwidths)


def _joined(members: Sequence[Grouping | int], uplinks: Sequence[int] = ()) -> Grouping | int:
    return members[0] if len(members) == 1 else _grouping(members, uplinks)


def _grouping(members: Sequence[Grouping | int], uplinks: Sequence[int]) -> Grouping:
    """Return a group with members' parts proportional to the uplinks. The number of simultaneous
    senders is such that an owner receives at most a buffer at a time, as prices assume."""
    # Like uplinks need no unlike parts.
    if len(set(uplinks)) <= 1:
        return even(members)
    shares = balanced_shares(uplinks)
    num_senders = floor(1 / max(shares) + 1e-9)
    return Grouping(tuple(members), shares, num_senders if num_senders < len(members) - 1 else 0)
