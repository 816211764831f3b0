"""What of a replica its price depends on: equal replicas on equal nodes are priced once."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import pairwise

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage

ReplicaShape = Hashable
"""Equal for replicas of equal price."""


class ReplicaShapes:
    """Tells replicas apart by what stands where, not by the names of nodes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._node_classes: dict[str, int] = {}
        self._classes: dict[Hashable, int] = {}

    def of(self, replica: PlacedReplica, vocab_rows: int) -> ReplicaShape:
        """What stands in each stage, links between stages, micro-batches and launch counts."""
        nodes = [stage.devices[0].node for stage in replica.stages]
        links = self.cluster.node_links
        stages = tuple(map(self._stage, replica.stages))
        hops = tuple(
            None if one == other else (links[one, other], links[other, one])
            for one, other in pairwise(nodes)
        )
        share = replica.num_micro_batches, replica.micro_batch_size, replica.launch_counts
        return stages, hops, share, vocab_rows

    def _stage(self, stage: PlacedStage) -> Hashable:
        nodes = {device.node for device in stage.devices}
        if len(nodes) == 1:
            group: Hashable = self._node_class(*nodes), len(stage.devices)
        else:  # links inside the group count as well: it is like no other
            group = tuple(device.node for device in stage.devices)
        own = stage.shares, stage.recompute, stage.recompute_num_layers, stage.state_parts
        return group, stage.num_layers, own

    def _node_class(self, name: str) -> int:
        if name not in self._node_classes:
            node = self.cluster.node_by_name[name]
            gpu = node.gpu_type
            content = gpu.name, gpu.memory_bytes, node.link
            self._node_classes[name] = self._classes.setdefault(content, len(self._classes))
        return self._node_classes[name]
