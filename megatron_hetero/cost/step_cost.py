"""Costs of a placement: stages, replicas, the step, and the bytes across its boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise

from megatron_hetero.cluster.node_links import NodePair
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.network.nics import port_name
from megatron_hetero.cost.network.seconds import BoundaryTime, between
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.hashed import value


@value(frozen=True)
class StageCost:
    """One stage: its times for a micro-batch, its update once a step, its memory."""

    times: PassTimes
    tensor_parallel_s: float
    update_s: float
    memory: StageMemory
    num_layers: int
    measured: bool
    unlike_memories: tuple[StageMemory, ...] = ()
    """Memory of each device, in rank order, where devices differ; `memory` is then the tightest."""

    def device_memory(self, tensor_rank: int) -> StageMemory:
        """Return the memory of one device of the stage."""
        return self.unlike_memories[tensor_rank] if self.unlike_memories else self.memory

    @property
    def missing_bytes(self) -> int:
        """Count the bytes that the tightest device lacks; zero or less when the stage fits."""
        return self.memory.peak_bytes(self.num_layers) - self.memory.capacity_bytes


@value(frozen=True)
class ReplicaCost:
    """Costs of one replica: its stages, its hops in both directions, its makespan. `ends_s` is when
    each stage ends (empty where another system's prices do not say), `least_s` a lower bound of the
    makespan with any launch counts (0 where they do not say)."""

    stages: tuple[StageCost, ...]
    forward_hops: tuple[BoundaryTime, ...]
    backward_hops: tuple[BoundaryTime, ...]
    pipeline_s: float
    ends_s: tuple[float, ...] = ()
    least_s: float = 0.0

    @cached_property
    def missing_bytes(self) -> int:
        """Count the most bytes that any device lacks; zero or less when the replica fits."""
        return max(stage.missing_bytes for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Return whether every stage fits in memory."""
        return self.missing_bytes <= 0

    @cached_property
    def update_s(self) -> float:
        """Return the seconds of the slowest update."""
        return max(stage.update_s for stage in self.stages)


def least_step_s(replicas: Sequence[ReplicaCost]) -> float:
    """Bound a step of replicas from below, for any exchange and any launch counts."""
    return max(r.least_s for r in replicas) + max(r.update_s for r in replicas)


@value(frozen=True)
class PlacementCost:
    """A step: all pipelines, then the gradient exchange, then the slowest update.

    `card_s`: what the busiest network path, or line that paths share, carries of all replicas'
    boundaries in a step.
    """

    replicas: tuple[ReplicaCost, ...]
    card_s: float
    gradient_sync_s: float
    update_s: float

    @cached_property
    def pipelines_s(self) -> float:
        """Return the seconds until the last replica ends; replicas that cross the same path take
        turns on it."""
        return max(self.card_s, *(r.pipeline_s for r in self.replicas))

    @cached_property
    def step_time_s(self) -> float:
        """Return the seconds of one optimizer step."""
        return self.pipelines_s + self.gradient_sync_s + self.update_s

    @cached_property
    def least_step_s(self) -> float:
        """Bound the step from below for any launch counts, if its gradient exchange takes as
        long."""
        least_s = max(self.card_s, *(replica.least_s for replica in self.replicas))
        return least_s + self.gradient_sync_s + self.update_s

    @cached_property
    def missing_bytes(self) -> int:
        """Count the most bytes that any device lacks; zero or less when the placement fits."""
        return max(replica.missing_bytes for replica in self.replicas)

    @cached_property
    def measured(self) -> bool:
        """Return whether every time used was measured."""
        return all(s.measured for r in self.replicas for s in r.stages)


def path_seconds(
    placement: Placement, replicas: tuple[ReplicaCost, ...]
) -> dict[tuple[str, str], float]:
    """Return the seconds for which boundaries occupy each path between two nodes in a step."""
    card_s: dict[tuple[str, str], float] = {}
    for placed, cost in zip(placement.replicas, replicas, strict=True):
        # A stage is on one path: its first GPU tells the node.
        nodes = [stage.devices[0].node for stage in placed.stages]
        for i, (here, there) in enumerate(pairwise(nodes)):
            if here == there:
                continue
            for path, hop in (
                ((here, there), cost.forward_hops[i]),
                ((there, here), cost.backward_hops[i]),
            ):
                # Every micro-batch crosses each boundary once forward and once backward.
                busy_s = placed.num_micro_batches * hop.on_path_s
                card_s[path] = card_s.get(path, 0.0) + busy_s
    return card_s


def nic_seconds(
    cluster: Cluster, placement: Placement, replicas: Sequence[ReplicaCost]
) -> dict[str, float]:
    """Return the seconds for which boundaries occupy each NIC, of machines with several, in a
    step."""
    found: dict[str, float] = {}
    for placed, cost in zip(placement.replicas, replicas, strict=True):
        for i, (here, there) in enumerate(pairwise(placed.stages)):
            for ends, hop in (
                # Indexed by whether the end sends: `ends[True]` sends, `ends[False]` receives.
                ((there, here), cost.forward_hops[i]),
                ((here, there), cost.backward_hops[i]),
            ):
                # `place` is that of a GPU near the NIC, in its stage.
                for sends, place, seconds in hop.nics:
                    name = port_name((cluster.nic_of(ends[sends].devices[place]), sends))
                    found[name] = found.get(name, 0.0) + placed.num_micro_batches * seconds
    return found


def boundary_bytes(
    placement: Placement, replicas: Sequence[ReplicaCost]
) -> Iterator[tuple[tuple[int, int], NodePair, float]]:
    """Yield ((replica, boundary), nodes, bytes in a step) of each path that boundaries take, in
    both directions."""
    for r, (placed, cost) in enumerate(zip(placement.replicas, replicas, strict=True)):
        for i, (here, there) in enumerate(pairwise(placed.stages)):
            # Forward from here to there, then backward.
            for one, other, hop in (
                (here, there, cost.forward_hops[i]),
                (there, here, cost.backward_hops[i]),
            ):
                for pair, size in between(hop.parts, one.devices, other.devices):
                    yield (r, i), pair, placed.num_micro_batches * size
