"""The prices of a stage: its seconds, and the exchange of sharded layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.stage import StageMemory, tightest, update_traffic_bytes
from megatron_hetero.cost.memory.states import state_bytes
from megatron_hetero.cost.network.ring import RingHop, ring
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Sharding
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.stage_memories import MemoryPrices
from megatron_hetero.cost.step_cost import StageCost
from megatron_hetero.cost.sync.gradients import GradientExchangePrices
from megatron_hetero.cost.sync.sharded import exchange_times, slowest_layer
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.gradient_sums import update_time_s
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.model.spec import Workload

_MAIN_WEIGHT_BYTES = 4
_MOST_RINGS = 32
"""Rings that are kept: as many as a plan has stages, about."""


class StagePrices(MemoryPrices):
    """Prices of stages in their own settings, cached; `CostModel` makes replicas of them."""

    def __init__(
        self, cluster: Cluster, workload: Workload, profile: Profile | None = None
    ) -> None:
        self._exchanges: dict[tuple[object, ...], GradientExchangePrices] = {}
        self._rings: dict[tuple[object, ...], tuple[RingHop, ...]] = {}
        super().__init__(cluster, workload, profile)

    def _forget(self) -> None:
        super()._forget()
        self._stages: dict[tuple[object, ...], StageCost] = {}
        self.__dict__.pop("_exchange", None)  # a cached property, of the list copied from

    def stage(self, replica: PlacedReplica, index: int, rows: int) -> StageCost:
        """Price stage `index` of a replica.

        Args:
            index: the stage's place in the replica.
            rows: rows of the padded vocabulary.
        """
        costs = self._of_stage(replica, index)
        if costs is not self:
            return costs.stage(replica, index, rows)
        stage = replica.stages[index]
        if stage.sharding is not None:
            return self._sharded_stage(replica, index, rows, stage.sharding)
        # Memory depends on the micro-batches in flight; with launch counts of a plan's own also on
        # those of the neighbours, whose tensors are kept (`kept_sends`).
        kept: object = replica.num_in_flight[index]
        if replica.launch_counts is not None:
            kept = replica.num_in_flight[max(index - 1, 0) : index + 2]
        # The first layer tells layers apart only where they are of unlike kinds.
        start = replica.first_layers[index] if self.workload.model.kinds else 0
        place = start, index == 0, index == len(replica.stages) - 1, kept, rows
        key = stage, place
        found = self._stages.get(key)
        if found is None:
            # Stages alike on other GPUs share one price.
            like = self._likeness(stage), place
            found = self._stages.get(like)
            if found is None:
                found = self._stages[like] = self._whole_stage(replica, index, rows)
            self._stages[key] = found
        return found

    def _likeness(self, stage: PlacedStage) -> tuple[object, ...]:
        """Return equal for stages of equal prices: on one node its kind stands for the GPUs."""
        nodes = {device.node for device in stage.devices}
        if len(nodes) > 1 or stage.experts is not None:
            return (stage,)
        kind = self._kind(self.cluster.node_by_name[nodes.pop()])
        return (
            *(kind, len(stage.devices), stage.num_layers, stage.shares, stage.recompute),
            *(stage.recompute_num_layers, stage.state_parts, stage.optimizer_share),
            *(stage.context_parallel, stage.expert_shares, stage.precision, stage.context_shares),
        )

    def _whole_stage(self, replica: PlacedReplica, index: int, rows: int) -> StageCost:
        """Price a stage with all layers whole, in the settings of this price list."""
        stage = replica.stages[index]
        first, last = index == 0, index == len(replica.stages) - 1
        # Pieces under the stage's own recompute.
        costs = self.variant(recompute=stage.recompute)
        counts = self._kind_counts(replica, index)
        pieces = costs.stage_pieces(stage, rows).with_layers(counts)
        times = pieces.stage(stage.num_layers, first, last)
        communication = pieces.communication.times(stage.num_layers)
        # Some layers recomputed: these as priced, the others without recompute.
        if stage.recompute_num_layers is not None:
            num_kept = stage.num_layers - stage.recompute_num_layers
            plain = self.variant(recompute="none").stage_pieces(stage, rows).with_layers(counts)
            times = pieces.stage(stage.recompute_num_layers, first, last)
            times = times + plain.layer.times(num_kept)
            communication = pieces.communication.times(stage.recompute_num_layers)
            communication = communication + plain.communication.times(num_kept)
        # Memory of every GPU; the tightest decides, the slowest update counts.
        memories = self.stage_memories(replica, index, rows)
        num_layers, training = stage.num_layers, self.workload.training
        return StageCost(
            times,
            communication.total_s,
            max(
                update_time_s(update_traffic_bytes(memory, num_layers, self.holders, training), gpu)
                for memory, gpu in self._distinct(stage, memories)
            ),
            tightest(memories, stage.num_layers),
            stage.num_layers,
            pieces.measured,
            memories if len(set(map(id, memories))) > 1 else (),
        )

    def _sharded_stage(
        self, replica: PlacedReplica, index: int, rows: int, sharding: Sharding
    ) -> StageCost:
        """Price a stage with sharded layers.

        All replicas gather each of these layers together, so every pass lasts as long as that of
        the slowest.
        """
        # The stage as if whole, and its peers' passes.
        own = self.stage(replica.without_sharding, index, rows)
        passes = [self.stage(peer, index, rows).times for peer in sharding.replicas]
        # Seconds to exchange one layer, and the layer's own passes on the slowest replica.
        reduce_s, gather_s = self.layer_exchange_s(
            [peer.stages[index] for peer in sharding.replicas]
        )
        ends = [self._without_layers(peer, index, rows) for peer in sharding.replicas]
        waits = exchange_times(
            sharding.num_layers,
            gather_s,
            reduce_s,
            slowest_layer(passes, ends, own.num_layers),
            overlaps=self.workload.training.overlap_param_gather,
        )
        # Every pass waits for the slowest peer and for the exchanges.
        memories = self.stage_memories(replica, index, rows)
        return replace(
            own,
            times=waits
            + PassTimes(
                max(times.forward_s for times in passes),
                max(times.backward_s for times in passes),
            ),
            memory=tightest(memories, own.num_layers),
            unlike_memories=memories if len(set(map(id, memories))) > 1 else (),
        )

    def _without_layers(self, replica: PlacedReplica, index: int, rows: int) -> PassTimes:
        """Return the part of a stage's passes that is no layer's: embedding, head and loss."""
        costs, stage = self._of_stage(replica, index), replica.stages[index]
        pieces = costs.variant(recompute=stage.recompute).stage_pieces(stage, rows)
        return pieces.stage(0, index == 0, index == len(replica.stages) - 1)

    def layer_exchange_s(self, stages: Sequence[PlacedStage]) -> tuple[float, float]:
        """Return the seconds to send a sharded layer's gradients to their owners, and to gather the
        weights.

        Args:
            stages: those that hold the layer, one of each replica.
        """
        # Parameters of the whole layer: the flows divide it among the holders.
        size = layer_params(self.workload.model, even_share(self.workload.model, 1))
        gradients, weights = self._exchange.layer_flows(stages, size)
        # The busiest path decides, and adds its latency once.
        return (
            float(gradients.seconds.max(initial=0.0)) + gradients.latency_s,
            float(weights.seconds.max(initial=0.0)) + weights.latency_s,
        )

    def ring(self, groups: Sequence[PlacedStage]) -> tuple[RingHop, ...]:
        """Return the ring over tensor-parallel groups that hold a buffer (`cost.network.ring`);
        buffers of the same groups share theirs."""
        key = self.workload.model, *[(g.devices, g.shares, g.expert_shares) for g in groups]
        found = self._rings.get(key)
        if found is None:
            while len(self._rings) >= _MOST_RINGS:
                del self._rings[next(iter(self._rings))]
            found = ring(self.cluster, self.workload.model, groups)
            self._rings[key] = found
        return found

    @cached_property
    def _exchange(self) -> GradientExchangePrices:
        training = self.workload.training
        # Without the distributed optimizer replicas exchange gradients alone, and no weights.
        states = state_bytes(training)
        weight_bytes = states.weight if training.use_distributed_optimizer else None
        if weight_bytes is not None and training.mixes_precisions:
            weight_bytes = _MAIN_WEIGHT_BYTES  # to holders in other precisions
        # Lists of one cluster share what they know of exchanges alike.
        model, known = self.workload.model, self._exchanges
        key = model, states.gradient, weight_bytes
        if key not in known:
            known[key] = GradientExchangePrices(
                self.cluster, model, states.gradient, weight_bytes
            )
        return known[key]

    def _distinct(
        self, stage: PlacedStage, memories: Sequence[StageMemory]
    ) -> Iterable[tuple[StageMemory, GpuType]]:
        # One pair of memory and GPU stands for all equal ones.
        gpus = [self.cluster.gpu_type(device) for device in stage.devices]
        pairs = zip(memories, gpus, strict=True)
        return {
            (id(memory), gpu.name, gpu.memory_bytes): (memory, gpu) for memory, gpu in pairs
        }.values()
