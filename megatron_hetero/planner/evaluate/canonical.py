"""One form for all placements equal but for the numbers of equal nodes, GPUs or replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import repeat

from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import NO_SETTINGS, PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.placing import with_expert_groups
from megatron_hetero.plan.stock_ranks import (
    RankOrder,
    find_stock_arrangement,
    groups_fit,
    places_by_rank,
)


def canonical(
    placement: Placement,
    gpus: Mapping[str, tuple[int, ...]],
    known: dict[PlacedStage, PlacedStage] | None = None,
) -> tuple[Placement, RankOrder | None]:
    """Return replicas in a fixed order, and GPUs of a node given out in the order of their places.

    Where stock Megatron can run the placement, both follow its ranks, node by node; the order of
    ranks comes back too.  Elsewhere replicas with more micro-batches come first.

    Args:
        gpus: the usable GPUs of each node, ascending; all of a node are alike.
        known: stages of other placements, of which equal ones become the same object.
    """
    # Order of replicas by what they are.
    replicas = sorted(placement.replicas, key=_replica_key)
    num_stages = len(replicas[0].stages)
    stages = [(r, s) for r, replica in enumerate(replicas) for s in range(len(replica.stages))]
    # Stock Megatron's ranks go through the replicas in an order of its own.
    rank_order = None
    if is_symmetric(placement):
        arrangement = find_stock_arrangement(tuple(_machines(replica) for replica in replicas))
        if arrangement is not None:
            replicas = [replicas[r] for r in arrangement.replicas]
            rank_order = arrangement.rank_order
            places = places_by_rank(rank_order, len(replicas), num_stages, 1)
            stages = [(r, s) for r, s, _ in places]
    # Deal the GPUs of each node out in that order.
    free = {node: map(Device, repeat(node), indices) for node, indices in gpus.items()}
    bare: list[list[PlacedStage]] = [list(replica.stages) for replica in replicas]
    for r, s in stages:
        stage = bare[r][s]
        # GPUs of a node are alike: each stage gets the next ones.
        devices = tuple([next(free[node]) for node, _ in stage.devices])
        if devices != stage.devices or stage.own_settings != NO_SETTINGS:
            bare[r][s] = PlacedStage(devices, stage.num_layers)
        # Equal devices keep their stage as it is.
        if known is not None:
            bare[r][s] = known.setdefault(bare[r][s], bare[r][s])
    made = tuple(
        [
            PlacedReplica(tuple(of_replica), replica.num_micro_batches)
            for replica, of_replica in zip(replicas, bare, strict=True)
        ]
    )
    return Placement(made), rank_order


def _machines(replica: PlacedReplica) -> tuple[tuple[str, ...], ...]:
    """Return the machine of every place, [stage][tensor rank]: ranks are given out machine by
    machine, in any order of its cards (`CUDA_VISIBLE_DEVICES`), alike or not."""
    return tuple(tuple(map(machine_of, nodes)) for nodes in _nodes(replica))


def is_symmetric(placement: Placement) -> bool:
    """Return whether all replicas have the same micro-batches, and undivided stages of a common
    width with the same layers: the shapes that stock Megatron can be told."""
    return not placement.has_context_parallel and _is_regular(placement)


def _is_regular(placement: Placement) -> bool:
    first = placement.replicas[0]
    shapes = [s.num_layers for s in first.stages]
    return len(placement.widths) == 1 and all(
        r.num_micro_batches == first.num_micro_batches
        and [s.num_layers for s in r.stages] == shapes
        for r in placement.replicas
    )


def _replica_key(replica: PlacedReplica) -> tuple[object, ...]:
    return -replica.num_micro_batches, _nodes(replica), [s.num_layers for s in replica.stages]


def _nodes(replica: PlacedReplica) -> tuple[tuple[str, ...], ...]:
    """Return the node of every place, [stage][tensor rank]."""
    return tuple([tuple([node for node, _ in stage.devices]) for stage in replica.stages])


def arranged(
    placement: Placement, gpus: Mapping[str, tuple[int, ...]]
) -> tuple[Placement, RankOrder | None]:
    """Return the placement with replicas and GPUs in order, and the order of ranks, if stock
    Megatron runs the placement: all replicas and stages do alike. Otherwise return the placement as
    given, and None. For the ranks, groups that divide sequences count as a single group, as wide as
    all together.
    """
    # Stock Megatron has one shape and setting for all.
    replicas = placement.replicas
    first = replicas[0]
    if not _is_regular(placement):
        return placement, None
    # Equal shapes up to the layers, which may differ from stage to stage.
    shapes = {replace(s.shape, num_layers=0) for r in replicas for s in r.stages}
    if len(shapes) > 1 or not all(
        replica.launch_counts is None
        and all(
            stage.shares is None
            and stage.sharding is None
            and stage.context_shares is None
            and len(set(stage.expert_shares or ())) <= 1
            and stage.own_settings == first.stages[0].own_settings
            for stage in replica.stages
        )
        and replica.micro_batch_size == first.micro_batch_size
        for replica in replicas
    ):
        return placement, None
    # Its ranks see one group where sequences are divided.
    joined = [
        replace(r, stages=tuple([replace(s, context_parallel=1) for s in r.stages]))
        for r in replicas
    ]
    bare, rank_order = canonical(Placement(tuple(joined)), gpus)
    if rank_order is None or not groups_fit(shapes.pop(), len(first.stages), rank_order):
        return placement, None
    made = replace(
        placement, replicas=tuple(on_devices_of(first, replica) for replica in bare.replicas)
    )
    # Experts are dealt out anew, among the ranks that are neighbours now.
    if (sizes := first.stages[0].expert_groups) is not None:
        made = with_expert_groups(made, sizes)
    return made, rank_order


def on_devices_of(replica: PlacedReplica, other: PlacedReplica) -> PlacedReplica:
    """Return the replica with each stage on the devices of the other's in its place."""
    pairs = zip(replica.stages, other.stages, strict=True)
    stages = tuple([replace(stage, devices=own.devices) for stage, own in pairs])
    return replace(replica, stages=stages)
