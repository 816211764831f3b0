"""A planner for tests: plain enumeration, written without the package's search."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations, product

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.widths import usable_gpus, usable_widths
from megatron_hetero.model.spec import Workload

Group = tuple[Device, ...]


def best_step_time_s(
    cluster: Cluster, workload: Workload, costs: CostModel | None = None
) -> float | None:
    """Fastest step of all placements that fit, or None."""
    costs = costs or CostModel(cluster, workload)
    best = None
    for placement in all_placements(cluster, workload, costs):
        cost = costs.placement(placement)
        if cost.missing_bytes <= 0 and (best is None or cost.step_time_s < best):
            best = cost.step_time_s
    return best


def naive_placements(cluster: Cluster, workload: Workload) -> Iterator[Placement]:
    """What one would try by hand: each GPU type's first GPU alone; all GPUs as one pipeline of even
    layers; every GPU a replica, all with the same micro-batches (the last ones one less)."""
    training, num_layers = workload.training, workload.model.num_layers
    num_micro_batches = training.global_batch_size // training.micro_batch_size
    devices = [
        Device(node.name, index)
        for node in cluster.nodes
        if 1 in usable_widths(cluster, workload, node)
        for index in usable_gpus(cluster, node)
    ]
    for device in devices:
        yield Placement((PlacedReplica((PlacedStage((device,), num_layers),), num_micro_batches),))
    if len(devices) <= num_layers:
        each, more = divmod(num_layers, len(devices)) if devices else (0, 0)
        layers = [each + (i < more) for i in range(len(devices))]
        stages = tuple(PlacedStage((d,), n) for d, n in zip(devices, layers, strict=True))
        if stages:
            yield Placement((PlacedReplica(stages, num_micro_batches),))
    if devices and len(devices) <= num_micro_batches:
        each, more = divmod(num_micro_batches, len(devices))
        yield Placement(
            tuple(
                PlacedReplica((PlacedStage((device,), num_layers),), each + (i < more))
                for i, device in enumerate(devices)
            )
        )


def all_placements(
    cluster: Cluster, workload: Workload, costs: CostModel | None = None
) -> Iterator[Placement]:
    """Every placement, many of them several times."""
    costs = costs or CostModel(cluster, workload)
    training, num_layers = workload.training, workload.model.num_layers
    num_micro_batches = training.global_batch_size // training.micro_batch_size
    groups_of_node = [list(groups(costs, node.name)) for node in cluster.nodes]
    for choice in product(*groups_of_node):
        stages = [group for node in choice for group in node]
        for order in permutations(stages):
            for chains in splits(order, num_micro_batches):
                if any(len(chain) > num_layers for chain in chains):
                    continue
                layer_choices = product(*(parts(num_layers, len(chain)) for chain in chains))
                for layers in layer_choices:
                    for shares in parts(num_micro_batches, len(chains)):
                        yield Placement(
                            tuple(
                                PlacedReplica(tuple(map(PlacedStage, chain, counts)), share)
                                for chain, counts, share in zip(chains, layers, shares, strict=True)
                            )
                        )


def groups(costs: CostModel, name: str) -> Iterator[list[Group]]:
    """All multisets of TP groups on a node, GPUs taken from the first on."""
    node = costs.cluster.node_by_name[name]
    gpus = usable_gpus(costs.cluster, node)
    widths = costs.widths(node)

    def extend(taken: int, widest: int) -> Iterator[list[Group]]:
        yield []
        for width in widths:
            if width <= widest and taken + width <= len(gpus):
                group = tuple(Device(name, i) for i in gpus[taken : taken + width])
                for rest in extend(taken + width, width):
                    yield [group, *rest]

    yield from extend(0, len(gpus))


def splits(order: tuple[Group, ...], most: int) -> Iterator[list[tuple[Group, ...]]]:
    """All ways to cut a sequence of stages into replicas."""
    for sizes in (s for n in range(1, min(most, len(order)) + 1) for s in parts(len(order), n)):
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        yield [order[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def parts(total: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `total` as `count` positive integers."""
    if count == 1:
        if total >= 1:
            yield (total,)
        return
    for first in range(1, total - count + 2):
        for rest in parts(total - first, count - 1):
            yield (first, *rest)
