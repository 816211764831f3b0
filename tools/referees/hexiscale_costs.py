"""HexiScale's prices in the form that our planner asks for."""

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
from megatron_hetero.model.spec import Workload
from tools.referees.costs import RefereeCosts, check_expressible
from tools.referees.hexiscale import (
    DEVICE_TYPES,
    PIPELINE_FACTOR,
    SYNC_FACTOR,
    Gpu,
    Group,
    Hexiscale,
    Pipeline,
    Stage,
    columns_s,
)
from tools.referees.waiting.rules import FillRules

_FORWARD = 0.25
"""Forward's part of forward, recomputed forward and backward; the referee knows their sum alone."""
_NO_TIME = PassTimes(0.0, 0.0)


class HexiscaleCosts(RefereeCosts):
    """Times are multiplied by the factor that the referee puts before the slowest pipeline."""

    def __init__(self, cluster: Cluster, workload: Workload, referee: Hexiscale) -> None:
        super().__init__(cluster, workload)
        self.referee = referee
        self._boundaries: dict[tuple[tuple[str, ...], tuple[str, ...]], float] = {}

    def pieces(self, node: Node, width: int, vocab_rows: int) -> PieceTimes:
        """See `CostModel.pieces`."""
        devices = tuple(Device(node.name, i) for i in range(width))
        return self.group_pieces(devices, None, vocab_rows)

    def group_pieces(
        self, devices: Sequence[Device], shares: tuple[int, ...] | None, vocab_rows: int
    ) -> PieceTimes:
        """See `CostModel.group_pieces`; the first GPU's speed counts for all."""
        key = tuple(device.node for device in devices)
        if key not in self._pieces:
            group = self.group(devices)
            communication_s = PIPELINE_FACTOR * self.referee.layer_communication_s(group)
            layer_s = PIPELINE_FACTOR * self.referee.layer_compute_s(
                group[0].device_type, len(group)
            )
            self._pieces[key] = PieceTimes(
                _NO_TIME, _split(layer_s + communication_s), _NO_TIME, _split(communication_s), True
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
        """See `CostModel.memory`: the same however many micro-batches are in flight."""
        key = (node.gpu_type.name, width, first, last, 0, 0, None)
        if key not in self._memories:
            none, one = (self.referee.memory_bytes(layers, width, first, last) for layers in (0, 1))
            self._memories[key] = StageMemory(
                _parts(none, 2 * self.referee.message_bytes),
                _parts(one - none, self.referee.message_bytes / width),
                node.gpu_type.memory_bytes,
            )
        return self._memories[key]

    def boundary_s(self, senders: Sequence[Device], receivers: Sequence[Device]) -> float:
        """One boundary, both directions, as it weighs on the step."""
        key = (tuple(d.node for d in senders), tuple(d.node for d in receivers))
        if key not in self._boundaries:
            self._boundaries[key] = PIPELINE_FACTOR * self.referee.boundary_s(
                self.group(senders), self.group(receivers)
            )
        return self._boundaries[key]

    def hop(self, senders: Sequence[Device], receivers: Sequence[Device]) -> BoundaryTime:
        """One direction: half of what the referee charges the sender for both."""
        return BoundaryTime(self.boundary_s(senders, receivers) / 2, 0.0)

    def hop_loads_s(
        self, senders: Sequence[Device], receivers: Sequence[Device]
    ) -> tuple[float, float]:
        """Both directions are charged to the stage that sends forward."""
        return self.boundary_s(senders, receivers), 0.0

    def fill_rules(self) -> FillRules:
        """See `CostModel.fill_rules`."""
        from tools.referees.hexiscale_bound import HexiscaleRules  # which needs this class

        return HexiscaleRules(self)

    def quick_times_s(
        self, stage_times_s: Sequence[float], groups: Sequence[Sequence[Device]]
    ) -> tuple[float, float]:
        """Exact where a replica has at least as many micro-batches as stages."""
        period_s = max(stage_times_s)
        many = len(stage_times_s)
        return columns_s(stage_times_s, many) - (many - 1) * period_s, period_s

    def replica(self, replica: PlacedReplica, vocab_rows: int) -> ReplicaCost:
        """See `CostModel.replica`."""
        groups = [stage.devices for stage in replica.stages]
        stages = tuple(self.stage(replica, s, vocab_rows) for s in range(len(groups)))
        hops = tuple(self.hop(a, b) for a, b in pairwise(groups))
        loads_s = self.send_loads_s(groups)
        cells_s = [s.times.total_s + load_s for s, load_s in zip(stages, loads_s, strict=True)]
        return ReplicaCost(stages, hops, hops, columns_s(cells_s, replica.num_micro_batches))

    def stage(self, replica: PlacedReplica, index: int, rows: int) -> StageCost:
        """See `CostModel.stage`; the referee has no optimizer step."""
        stage = replica.stages[index]
        pieces = self.group_pieces(stage.devices, None, rows)
        return StageCost(
            pieces.layer.times(stage.num_layers),
            stage.num_layers * pieces.communication.total_s,
            0.0,
            self.stage_memory(replica, index, rows),
            stage.num_layers,
            True,
        )

    def combine(
        self, placement: Placement, replicas: tuple[ReplicaCost, ...], vocab_rows: int
    ) -> PlacementCost:
        """See `CostModel.combine`: replicas do not share the paths between machines."""
        return PlacementCost(replicas, 0.0, self.sync_s(placement, vocab_rows), 0.0)

    def sync_s(self, placement: Placement, vocab_rows: int) -> float:
        """See `CostModel.sync_s`."""
        return SYNC_FACTOR * self.referee.sync_s(self.pipelines(placement))

    def pipelines(self, placement: Placement) -> list[Pipeline]:
        """A placement in the referee's words.

        Raises:
            UnsupportedError: it has no words for it.
        """
        check_expressible(placement, across_machines=True)
        return [
            Pipeline(
                tuple(Stage(self.group(s.devices), s.num_layers) for s in replica.stages),
                replica.num_micro_batches,
            )
            for replica in placement.replicas
        ]

    def group(self, devices: Sequence[Device]) -> Group:
        """A tensor-parallel group in the referee's words; it may span machines."""
        return tuple(
            Gpu(d.node, d.index, DEVICE_TYPES[self.cluster.gpu_type(d).name]) for d in devices
        )


def _split(total_s: float) -> PassTimes:
    return PassTimes(_FORWARD * total_s, total_s - _FORWARD * total_s)


def _parts(total_bytes: float, activation_bytes: float) -> dict[str, int]:
    """By cause, as our memory model names them: 8 bytes a parameter are weight, gradient and two
    moments in 16 bits."""
    eighth = (total_bytes - activation_bytes) / 4
    parts = {
        "weights": eighth,
        "gradients": eighth,
        "optimizer": 2 * eighth,
        "activations": activation_bytes,
        "buffers": 0.0,
        "reserve": 0.0,
    }
    return {name: -int(-value // 1) for name, value in parts.items()}
