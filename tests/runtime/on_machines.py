"""Plans on several machines, for tests that train them on this one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Host, Plan
from tests.runtime.workloads import plan


def on_machines(
    layout: str,
    machines: Sequence[str],
    groups: Sequence[Sequence[str]] = (),
    uplinks: Sequence[Sequence[int]] = (),
) -> Plan:
    """Put each replica of a layout on a machine of its own (equal names share one), in turn.

    Args:
        layout: of the plan.
        machines: [replica] -> name; those of one machine follow one another.
        groups: of machines, as `Plan.exchange_groups`.
        uplinks: of these machines, as `Plan.exchange_uplinks`.
    """
    return placed(plan(layout), machines, groups, uplinks)


def placed(
    bare: Plan,
    machines: Sequence[str],
    groups: Sequence[Sequence[str]] = (),
    uplinks: Sequence[Sequence[int]] = (),
) -> Plan:
    """Put each replica of a plan without devices on a machine, as `on_machines` does."""
    used: dict[str, int] = {}
    replicas = []
    for replica, machine in zip(bare.replicas, machines, strict=True):
        stages = []
        for stage in replica.stages:
            first = used.get(machine, 0)
            used[machine] = first + stage.shape.num_devices
            names = tuple(f"{machine}:{i}" for i in range(first, used[machine]))
            stages.append(replace(stage, devices=names))
        replicas.append(replace(replica, stages=tuple(stages)))
    hosts = tuple(Host(name, name, "A100-40GB", tuple(range(n))) for name, n in used.items())
    made = replace(
        bare,
        replicas=tuple(replicas),
        hosts=hosts,
        exchange_groups=tuple(tuple(group) for group in groups),
        exchange_uplinks=tuple(tuple(group) for group in uplinks),
    )
    validate_plan(made)
    return made
