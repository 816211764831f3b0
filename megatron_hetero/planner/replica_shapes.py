"""What the price of a replica depends on: equal replicas on equal nodes are priced once."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Mapping
from functools import cached_property
from itertools import combinations, pairwise, starmap

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage

ReplicaShape = Hashable
"""Equal for replicas of equal price."""


class Likeness:
    """Numbers for nodes and paths: equal nodes or paths have one number, whatever the name."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._nodes: dict[str, int] = {}
        self._hops: dict[tuple[int, int], int] = {}
        """By the classes of the links there and back: there are few, however many pairs."""
        self._numbers: dict[Hashable, int] = {}

    def node(self, name: str) -> int:
        """Return equal for nodes with the same GPUs and the same link between them."""
        if name not in self._nodes:
            node = self.cluster.node_by_name[name]
            content = node.gpu_type.name, node.gpu_type.memory_bytes, node.link, node.nics
            self._nodes[name] = self._numbers.setdefault(content, len(self._numbers))
        return self._nodes[name]

    def hop(self, one: str, other: str) -> int:
        """Return equal for pairs with the same links there and back; a node has none to itself."""
        if one == other:
            return -1
        own, classes = self._node_number, self._link_classes
        here, there = own[one], own[other]
        content = classes[here][there], classes[there][here]
        found = self._hops.get(content)
        if found is None:
            # Numbers of hops and of nodes are told apart by their contents.
            found = self._numbers.setdefault(("hop", *content), len(self._numbers))
            self._hops[content] = found
        return found

    @cached_property
    def _node_number(self) -> Mapping[str, int]:
        return self.cluster.link_classes.node_number

    @cached_property
    def _link_classes(self) -> list[array[int]]:
        """Return the class of the link from each node to each other, in rows of Python's own
        arrays: quicker to look up in than those of numpy, and half as large as lists."""
        return [array("i", row.tolist()) for row in self.cluster.link_classes.of_pairs]


class ReplicaShapes:
    """Tells replicas apart by what stands where, not by the names of nodes."""

    def __init__(self, likeness: Likeness) -> None:
        self.likeness = likeness

    def of(self, replica: PlacedReplica, vocab_rows: int) -> ReplicaShape:
        """Return what stands in each stage, links between stages, micro-batches and launch
        counts."""
        share = replica.num_micro_batches, replica.micro_batch_size, replica.launch_counts
        settings = [
            (stage.num_layers, stage.recompute, stage.recompute_num_layers, stage.sharding)
            for stage in replica.stages
        ]
        return self.of_groups(replica, vocab_rows), tuple(settings), share

    def of_groups(self, replica: PlacedReplica, vocab_rows: int) -> Hashable:
        """Return the part of a replica that stays when layers, recompute and micro-batches change:
        the groups of the stages, and the links between the groups."""
        nodes = [stage.devices[0].node for stage in replica.stages]
        hops = tuple(starmap(self.likeness.hop, pairwise(nodes)))
        return tuple([self._group(stage) for stage in replica.stages]), hops, vocab_rows

    def _group(self, stage: PlacedStage) -> Hashable:
        devices = stage.devices
        first = devices[0].node
        if len({device.node for device in devices}) == 1:
            group: Hashable = self.likeness.node(first)
        else:  # links inside the group count as well: it is like no other
            group = tuple([device.node for device in devices])
        cluster = self.likeness.cluster
        if cluster.has_nics:
            group = group, tuple(map(cluster.nic_number, devices))
        divided = stage.context_parallel, stage.context_shares
        shares = stage.shares, stage.expert_shares, self._experts(stage)
        return group, len(devices), divided, shares, stage.state_parts

    def _experts(self, stage: PlacedStage) -> Hashable:
        """Return with whom a stage deals experts out over replicas, as if nodes had no names."""
        if stage.experts is None:
            return None
        nodes = [device.node for device in stage.experts.devices]
        unlike = list(dict.fromkeys(nodes))
        hops = tuple(starmap(self.likeness.hop, combinations(unlike, 2)))
        numbers = tuple((unlike.index(node), self.likeness.node(node)) for node in nodes)
        cluster = self.likeness.cluster
        nics = tuple(map(cluster.nic_number, stage.experts.devices)) if cluster.has_nics else ()
        return stage.experts.sizes, numbers, hops, nics
