"""Equal GPUs exchanged so that a placement keeps as many bytes in place as possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.memory.holdings import (
    Holdings,
    StateSizes,
    holdings,
    overlap_bytes,
    parts_of_placement,
)
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.kinds import kinds_of
from megatron_hetero.rounding import ROUNDING, at_most

_MAX_NODES = 16
"""Nodes of a kind that are exchanged."""


def nearest_labels(
    problem: Problem, placement: Placement, kept: Holdings, sizes: StateSizes
) -> Placement:
    """Return the placement with like nodes, and the GPUs of each node, exchanged for the most
    bytes in common with `kept`.  Nodes stay where their links make a difference to the step."""
    moved = _exchanged(problem, placement, kept, sizes, across_nodes=True)
    costs = problem.costs
    if moved != placement:
        before, after = costs.placement(placement), costs.placement(moved)
        # Like nodes may still differ in their links to others: the step must not get longer.
        if at_most(after.step_time_s, before.step_time_s):
            return moved
    return _exchanged(problem, placement, kept, sizes, across_nodes=False)


def _exchanged(
    problem: Problem, placement: Placement, kept: Holdings, sizes: StateSizes, across_nodes: bool
) -> Placement:
    wanted = holdings(problem.workload, parts_of_placement(placement))
    gains: dict[tuple[str, str], tuple[float, dict[Device, Device]]] = {}

    def gain(role: str, node: str) -> tuple[float, dict[Device, Device]]:
        """Return the bytes in common if `node` takes the part of `role` in the placement, and the
        map from the role's GPUs to the node's."""
        if (role, node) not in gains:
            roles = [Device(role, i) for i in problem.gpus[role]]
            places = [Device(node, i) for i in problem.gpus[node]]
            # [role, place]: bytes that both hold.
            table = [
                [overlap_bytes(sizes, wanted.get(r.name, {}), kept.get(p.name, {})) for p in places]
                for r in roles
            ]
            chosen = _assign(table)
            total = sum(table[i][j] for i, j in enumerate(chosen))
            gains[role, node] = total, {roles[i]: places[j] for i, j in enumerate(chosen)}
        return gains[role, node]

    devices: dict[Device, Device] = {}
    for kind in kinds_of(problem):
        names = [node.name for node in kind.nodes]
        order = list(range(len(names)))
        if across_nodes and 1 < len(names) <= _MAX_NODES:
            order = _assign([[gain(role, node)[0] for node in names] for role in names])
        for i, j in enumerate(order):
            devices |= gain(names[i], names[j])[1]
    return _renamed(placement, devices)


def _assign(table: Sequence[Sequence[float]]) -> list[int]:
    """[row] -> column, the largest sum; rows that gain nothing by it keep their own column."""
    from scipy.optimize import linear_sum_assignment  # a third of a second

    size = len(table)
    # A tiny premium on the diagonal: who gains nothing does not move.
    total = 1.0 + sum(map(sum, table))
    stay = ROUNDING * total / size
    cost = [[-table[i][j] - (stay if i == j else 0.0) for j in range(size)] for i in range(size)]
    _, columns = linear_sum_assignment(cost)
    return [int(column) for column in columns]


def _renamed(placement: Placement, devices: Mapping[Device, Device]) -> Placement:
    """Return other devices in the same places."""
    return replace(placement, replicas=_renamed_replicas(placement.replicas, devices))


def _renamed_replicas(
    replicas: Sequence[PlacedReplica], devices: Mapping[Device, Device]
) -> tuple[PlacedReplica, ...]:
    return tuple(
        replace(replica, stages=tuple(_renamed_stage(stage, devices) for stage in replica.stages))
        for replica in replicas
    )


def _renamed_stage(stage: PlacedStage, devices: Mapping[Device, Device]) -> PlacedStage:
    # What follows from all replicas names devices as well.
    experts, sharding = stage.experts, stage.sharding
    if experts is not None:
        experts = replace(experts, devices=tuple(devices[d] for d in experts.devices))
    if sharding is not None:
        sharding = replace(sharding, replicas=_renamed_replicas(sharding.replicas, devices))
    return replace(
        stage,
        devices=tuple(devices[d] for d in stage.devices),
        experts=experts,
        sharding=sharding,
    )
