"""Exchanges that reduce inside machines, then inside groups of machines, then between the groups.

A plan names groups of machines that are near to each other (`Plan.exchange_groups`).  What crosses
between two groups is then the sum of each, once, and not what a ring over all holders hands on.
The planner's prices, the simulation and the runtime make their exchanges here.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.exchange.grouping import Grouping, even, grouped_plan
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose


def plan_by_group(
    machines: Sequence[str],
    groups: Sequence[Sequence[str]],
    size: int,
    purpose: Purpose,
    owners: Sequence[Owned] | None = None,
) -> ExchangePlan | None:
    """Make the exchange of some holders; None where they are all in one group, which has no other
    exchange than without groups.

    Args:
        machines: [holder] -> its machine, which is in one of the groups.
        groups: names of machines.
        size: elements of the buffer, > 0.
        purpose: all-reduce, reduce-scatter or all-gather.
        owners: of all elements, where they are given; else members own equal parts.
    """
    grouping = grouping_of(machines, groups)
    return None if grouping is None else grouped_plan("by groups", purpose, size, grouping, owners)


def grouping_of(machines: Sequence[str], groups: Sequence[Sequence[str]]) -> Grouping | None:
    """Return who of some holders reduces with whom first; arguments and None as `plan_by_group`."""
    group_of = {machine: number for number, group in enumerate(groups) for machine in group}
    found: dict[int, dict[str, list[int]]] = {}
    for holder, machine in enumerate(machines):
        found.setdefault(group_of[machine], {}).setdefault(machine, []).append(holder)
    if len(found) < 2:
        return None
    members = [
        _joined([_joined(holders) for holders in of_machines.values()])
        for _, of_machines in sorted(found.items())
    ]
    return even(members)


def _joined(members: Sequence[Grouping | int]) -> Grouping | int:
    return members[0] if len(members) == 1 else even(members)
