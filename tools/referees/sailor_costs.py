"""Sailor's prices in the form that our planner asks for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron_hetero.cluster.nodes import Device, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.step_cost import PlacementCost, ReplicaCost, StageCost
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.pieces import PieceTimes
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import Workload
from tools.referees.costs import RefereeCosts, check_expressible
from tools.referees.sailor import (
    STATE_BYTES,
    Group,
    Pipeline,
    Sailor,
    capacity_bytes,
    fixed_bytes,
    pipelines_of,
    stage_loads_s,
)
from tools.referees.sailor_tables import ELEMENT_BYTES, EntryMemory
from tools.referees.waiting.rules import FillRules

_STATES = {"weights": 4, "gradients": 4, "optimizer": 8, "buffers": STATE_BYTES - 16}


@value(frozen=True)
class LockstepCost(PlacementCost):
    """A step whose like replicas wait for each other at every stage."""

    lockstep_s: float = 0.0

    @property
    def pipelines_s(self) -> float:
        """Until the last pipeline ends."""
        return self.lockstep_s


class SailorCosts(RefereeCosts):
    """The GPU types and zones of the tables are the cluster's GPU types and sites."""

    def __init__(self, cluster: Cluster, workload: Workload, referee: Sailor) -> None:
        super().__init__(cluster, workload)
        self.referee = referee
        self._groups: dict[tuple[str, int], Group] = {}
        self._lockstep: dict[tuple[Pipeline, int], float] = {}
        self._sync: dict[tuple[Pipeline, ...], float] = {}

    def widths(self, node: Node) -> tuple[int, ...]:
        """Only what was measured."""
        measured = self.referee.tables.widths(node.gpu_type.name)
        return tuple(width for width in super().widths(node) if width in measured)

    def pieces(self, node: Node, width: int, vocab_rows: int) -> PieceTimes:
        """The second layer stands for all; the embedding takes what the first one differs by."""
        key = (node.gpu_type.name, width, 0)
        if key not in self._pieces:
            times = self.referee.tables.times(node.gpu_type.name, width)
            num_layers = self.workload.model.num_layers
            layers, ends = times[1 : num_layers + 1], times[num_layers + 1 :]
            middle = layers[-1]
            first, last = [times[0], *layers], ends
            self._pieces[key] = PieceTimes(
                PassTimes(
                    sum(e.forward_s for e in first) - num_layers * middle.forward_s,
                    sum(e.backward_s for e in first) - num_layers * middle.backward_s,
                ),
                PassTimes(middle.forward_s, middle.backward_s),
                PassTimes(sum(e.forward_s for e in last), sum(e.backward_s for e in last)),
                PassTimes(0.0, 0.0),
                True,
            )
        return self._pieces[key]

    def memory(
        self,
        node: Node,
        width: int,
        first: bool,
        last: bool,
        num_in_flight: int,
        vocab_rows: int,
        num_sends_kept: int | None = None,
        share: TensorShare | None = None,
    ) -> StageMemory:
        """See `CostModel.memory`."""
        key = (node.gpu_type.name, width, first, last, num_in_flight, 0, None)
        if key not in self._memories:
            memory = self.referee.tables.memory(width)
            num_layers = self.workload.model.num_layers
            middle = memory[num_layers]
            held: list[EntryMemory] = []
            params = floats = 0
            if first:
                held += memory[: num_layers + 1]
                params -= num_layers * middle.num_params
                floats -= num_layers * middle.activation_floats
            if last:
                held += memory[num_layers + 1 :]
            params += sum(entry.num_params for entry in held)
            floats += sum(entry.activation_floats for entry in held)
            scale = self.workload.training.micro_batch_size * ELEMENT_BYTES * num_in_flight
            self._memories[key] = StageMemory(
                _parts(params, floats * scale, fixed_bytes(width)),
                _parts(middle.num_params, middle.activation_floats * scale, 0),
                capacity_bytes(node.gpu_type.name),
            )
        return self._memories[key]

    def hop(self, senders: Sequence[Device], receivers: Sequence[Device]) -> BoundaryTime:
        """One message of a micro-batch."""
        key = (self.group(senders), self.group(receivers))
        if key not in self._hops:
            here, there = key
            tables = self.referee.tables
            num_bytes = tables.memory(1)[1].output_floats * ELEMENT_BYTES * tables.micro_batch_size
            self._hops[key] = BoundaryTime(
                tables.message_s(here.sender, there.sender, num_bytes), 0.0
            )
        return self._hops[key]

    def hop_loads_s(
        self, senders: Sequence[Device], receivers: Sequence[Device]
    ) -> tuple[float, float]:
        """Each stage is charged what it sends; the ends' extra charge is in `send_loads_s` only."""
        return self.hop(senders, receivers).total_s, self.hop(receivers, senders).total_s

    def send_loads_s(self, groups: Sequence[Sequence[Device]]) -> tuple[float, ...]:
        """p_i of a replica alone."""
        activations_s = [self.hop(a, b).total_s for a, b in pairwise(groups)]
        gradients_s = [self.hop(b, a).total_s for a, b in pairwise(groups)]
        return tuple(stage_loads_s([*activations_s, 0.0], [0.0, *gradients_s]))

    def fill_rules(self) -> FillRules:
        """See `CostModel.fill_rules`."""
        from tools.referees.sailor_bound import SailorRules  # which needs this class

        return SailorRules(self)

    def quick_times_s(
        self, stage_times_s: Sequence[float], groups: Sequence[Sequence[Device]]
    ) -> tuple[float, float]:
        """Exact for a replica alone."""
        return sum(stage_times_s), max(stage_times_s)

    def replica(self, replica: PlacedReplica, vocab_rows: int) -> ReplicaCost:
        """See `CostModel.replica`."""
        groups = [stage.devices for stage in replica.stages]
        stages = tuple(self.stage(replica, s, vocab_rows) for s in range(len(groups)))
        loads_s = self.send_loads_s(groups)
        times_s = [s.times.total_s + load for s, load in zip(stages, loads_s, strict=True)]
        return ReplicaCost(
            stages,
            tuple(self.hop(a, b) for a, b in pairwise(groups)),
            tuple(self.hop(b, a) for a, b in pairwise(groups)),
            sum(times_s) + (replica.num_micro_batches - 1) * max(times_s),
        )

    def stage(self, replica: PlacedReplica, index: int, rows: int) -> StageCost:
        """See `CostModel.stage`."""
        stage = replica.stages[index]
        first, last = index == 0, index == len(replica.stages) - 1
        node = self.cluster.node_by_name[stage.devices[0].node]
        times = self.referee.tables.times(node.gpu_type.name, stage.width)
        entry = 0 if first else 1 + replica.first_layers[index]
        return StageCost(
            self.pieces(node, stage.width, rows).stage(stage.num_layers, first, last),
            0.0,
            times[entry].update_s,
            self.stage_memory(replica, index, rows),
            stage.num_layers,
            True,
        )

    def combine(
        self, placement: Placement, replicas: tuple[ReplicaCost, ...], vocab_rows: int
    ) -> PlacementCost:
        """See `CostModel.combine`."""
        most = max(replica.num_micro_batches for replica in placement.replicas)
        pipelines = self.pipelines(placement)
        for pipeline in pipelines:
            if (pipeline, most) not in self._lockstep:
                self._lockstep[pipeline, most] = self.referee.lockstep_s(pipeline, most)
        lockstep_s = max(self._lockstep[pipeline, most] for pipeline in pipelines)
        return LockstepCost(replicas, 0.0, self._sync_s(pipelines), 0.0, lockstep_s)

    def sync_s(self, placement: Placement, vocab_rows: int) -> float:
        """See `CostModel.sync_s`."""
        return self._sync_s(self.pipelines(placement))

    def _sync_s(self, pipelines: tuple[Pipeline, ...]) -> float:
        if pipelines not in self._sync:
            self._sync[pipelines] = self.referee.sync_s(pipelines)
        return self._sync[pipelines]

    def pipelines(self, placement: Placement) -> tuple[Pipeline, ...]:
        """A placement in the referee's words.

        Raises:
            UnsupportedError: it has no words for it.
        """
        check_expressible(placement)
        return pipelines_of(
            [
                (
                    tuple(stage.num_layers for stage in replica.stages),
                    tuple(self.group(stage.devices) for stage in replica.stages),
                )
                for replica in placement.replicas
            ]
        )

    def group(self, devices: Sequence[Device]) -> Group:
        """A tensor-parallel group in the referee's words."""
        key = (devices[0].node, len(devices))
        if key not in self._groups:
            node = self.cluster.node_by_name[devices[0].node]
            self._groups[key] = Group(node.site, node.gpu_type.name, len(devices), node.num_gpus)
        return self._groups[key]


def _parts(num_params: int, activation_bytes: int, reserve_bytes: int) -> dict[str, int]:
    """By cause, as our memory model names them; "buffers" holds copies and communication."""
    parts = {name: num_params * num_bytes for name, num_bytes in _STATES.items()}
    return {**parts, "activations": activation_bytes, "reserve": reserve_bytes}
