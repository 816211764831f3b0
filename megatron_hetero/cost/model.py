"""One price list for a cluster and a workload: the cost of any placement, cached piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, Self

from megatron_hetero.cluster.node_links import NodePair
from megatron_hetero.cluster.spec import Cluster, GpuType, Node
from megatron_hetero.cost.memory.device import (
    StageMemory,
    StateHolders,
    kept_sends,
    state_bytes,
    tightest,
    updated_bytes,
    with_some_layers_recomputed,
)
from megatron_hetero.cost.memory.libraries import memory_kind
from megatron_hetero.cost.memory.parameters import embedding_params, layer_params
from megatron_hetero.cost.memory.sharded import sharded_memory
from megatron_hetero.cost.network.lines import line_seconds
from megatron_hetero.cost.pipeline import least_pipeline_time_s, stage_ends_s
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement, Sharding
from megatron_hetero.cost.step_cost import (
    PlacementCost,
    ReplicaCost,
    StageCost,
    boundary_bytes,
    nic_seconds,
    path_seconds,
)
from megatron_hetero.cost.sync.buckets import StageId
from megatron_hetero.cost.sync.gradients import Carried, GradientExchangePrices, StageEnd
from megatron_hetero.cost.sync.least import (
    NO_SYNC,
    Cut,
    LeastSync,
    least_ends_sync_s,
    least_sync,
)
from megatron_hetero.cost.sync.room import room_of
from megatron_hetero.cost.sync.sharded import exchange_times, slowest_layer
from megatron_hetero.cost.unit_prices import UnitPrices
from megatron_hetero.cost.work.compute import PassTimes, update_time_s
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.cost.work.share import even_share, member_shares
from megatron_hetero.model.spec import Workload

_MAIN_WEIGHT_BYTES = 4


class CostModel(UnitPrices):
    """Prices of one workload on one cluster. Pure: equal questions get equal answers.

    Other prices are a subclass (`MakeCosts`): the search asks for unit prices where it builds
    plans, and for `replica` and `combine` where it compares them.
    """

    has_launch_counts: ClassVar[bool] = True
    """Whether launch counts other than 1F1B's own can make its pipelines faster."""
    has_variants: ClassVar[bool] = True
    """Whether it prices unequal shares, and replicas or stages whose micro-batch size or recompute
    are not the job's."""

    def _forget(self) -> None:
        super()._forget()
        self._stages: dict[tuple[object, ...], StageCost] = {}

    def _of_stage(self, replica: PlacedReplica, index: int) -> Self:
        """Return the price list under the settings of stage `index` alone, but for its
        recompute."""
        parts = replica.stages[index].state_parts
        holders = None
        if parts is not None and self.workload.training.use_distributed_optimizer:
            holders = StateHolders(*(1 / part for part in parts))
        costs = self.variant(micro_batch_size=replica.micro_batch_size, holders=holders)
        return costs.of_stage(replica.stages[index])

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
        kept: object = replica.num_in_flight[index]
        if replica.launch_counts is not None:
            kept = replica.num_in_flight[max(index - 1, 0) : index + 2]
        start = replica.first_layers[index] if self.workload.model.kinds else 0
        key = stage, start, index == 0, index == len(replica.stages) - 1, kept, rows
        if key not in self._stages:
            self._stages[key] = self._whole_stage(replica, index, rows)
        return self._stages[key]

    def _whole_stage(self, replica: PlacedReplica, index: int, rows: int) -> StageCost:
        """Price a stage that holds all of its layers, in the settings of this price list."""
        stage = replica.stages[index]
        first, last = index == 0, index == len(replica.stages) - 1
        costs = self.variant(recompute=stage.recompute)
        counts = self._kind_counts(replica, index)
        pieces = costs.stage_pieces(stage, rows).with_layers(counts)
        times = pieces.stage(stage.num_layers, first, last)
        communication = pieces.communication.times(stage.num_layers)
        if stage.recompute_num_layers is not None:
            num_kept = stage.num_layers - stage.recompute_num_layers
            plain = self.variant(recompute="none").stage_pieces(stage, rows).with_layers(counts)
            times = pieces.stage(stage.recompute_num_layers, first, last)
            times = times + plain.layer.times(num_kept)
            communication = pieces.communication.times(stage.recompute_num_layers)
            communication = communication + plain.communication.times(num_kept)
        memories = self.stage_memories(replica, index, rows)
        return StageCost(
            times,
            communication.total_s,
            max(
                update_time_s(updated_bytes(memory, stage.num_layers, self.holders), gpu)
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
        own = self.stage(replica.without_sharding, index, rows)
        passes = [self.stage(peer, index, rows).times for peer in sharding.replicas]
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
        """Return the seconds in which the gradients of a sharded layer go to their owners, and in
        which its weights are gathered.

        Args:
            stages: those that hold the layer, one of each replica.
        """
        size = layer_params(self.workload.model, even_share(self.workload.model, 1))
        gradients, weights = self._exchange.layer_flows(stages, size)
        return (
            float(gradients.seconds.max(initial=0.0)) + gradients.latency_s,
            float(weights.seconds.max(initial=0.0)) + weights.latency_s,
        )

    def stage_memory(self, replica: PlacedReplica, index: int, rows: int) -> StageMemory:
        """Return the memory of the fullest GPU of stage `index`."""
        memories = self.stage_memories(replica, index, rows)
        return tightest(memories, replica.stages[index].num_layers)

    def stage_memories(
        self, replica: PlacedReplica, index: int, rows: int
    ) -> tuple[StageMemory, ...]:
        """Return the memory of each GPU of stage `index`, in rank order; equal ones are one object.

        With launch counts of its own a replica runs in our runtime.
        """
        costs = self._of_stage(replica, index)
        if costs is not self:
            return costs.stage_memories(replica, index, rows)
        if (sharding := replica.stages[index].sharding) is not None:
            return self._sharded_memories(replica, index, rows, sharding)
        stage, num_in_flight = replica.stages[index], replica.num_in_flight
        first, last = index == 0, index == len(replica.stages) - 1
        num_sends_kept = None
        if replica.launch_counts is not None:
            num_sends_kept = kept_sends(num_in_flight)[index]
        model, made = self.workload.model, dict[tuple[object, ...], StageMemory]()
        some = stage.recompute_num_layers
        found = []
        shares = member_shares(
            model,
            stage.width,
            stage.shares,
            stage.context_parallel,
            stage.expert_shares,
            stage.context_shares,
        )
        for device, share in zip(stage.devices, shares, strict=True):
            node = self.cluster.node_by_name[device.node]
            key = (*memory_kind(node), share)
            if key not in made:
                asked = (
                    *(node, stage.width, first, last, num_in_flight[index], rows),
                    *(num_sends_kept, share),
                )
                memory = self.variant(recompute=stage.recompute).memory(*asked)
                if some is not None:
                    kept = self.variant(recompute="none").memory(*asked)
                    memory = with_some_layers_recomputed(kept, memory, some)
                made[key] = memory.with_layers(self._kind_counts(replica, index))
            found.append(made[key])
        return tuple(found)

    def _sharded_memories(
        self, replica: PlacedReplica, index: int, rows: int, sharding: Sharding
    ) -> tuple[StageMemory, ...]:
        """Return the memory of each GPU of a stage with sharded layers."""
        num_layers = replica.stages[index].num_layers
        is_cut_alike = len({peer.stages[index].cut for peer in sharding.replicas}) == 1
        sharded = sharded_memory(
            self.workload.training, self.holders.layers, is_cut_alike=is_cut_alike
        )
        whole = self.stage_memories(replica.without_sharding, index, rows)
        made = {id(memory): sharded.of(memory, sharding.num_layers, num_layers) for memory in whole}
        return tuple(made[id(memory)] for memory in whole)

    def _kind_counts(self, replica: PlacedReplica, index: int) -> tuple[int, ...]:
        """Count the layers of each kind on stage `index`; empty where all layers are alike."""
        model = self.workload.model
        if not model.kinds:
            return ()
        return model.kind_counts(replica.first_layers[index], replica.stages[index].num_layers)

    def replica(self, replica: PlacedReplica, vocab_rows: int) -> ReplicaCost:
        """Price the stages, the hops and the pipeline of one replica.

        With the distributed optimizer, ask `sharded_as(placement)`: its memory depends on all
        replicas.
        """
        stages = tuple(
            self.stage(replica, index, vocab_rows) for index in range(len(replica.stages))
        )
        costs = self.variant(micro_batch_size=replica.micro_batch_size)
        forward = tuple(costs.stage_hop(a, b) for a, b in pairwise(replica.stages))
        backward = tuple(costs.stage_hop(b, a) for a, b in pairwise(replica.stages))
        times, num_micro_batches = [s.times for s in stages], replica.num_rounds
        ends_s = stage_ends_s(
            times,
            forward,
            backward,
            num_micro_batches,
            # An order of its own (`plan.order`) may hold more on a later stage; 1F1B cannot.
            tuple(accumulate(replica.num_in_flight, min)),
        )
        least_s = least_pipeline_time_s(times, forward, backward, num_micro_batches)
        return ReplicaCost(stages, forward, backward, max(ends_s), ends_s, least_s)

    def placement(self, placement: Placement) -> PlacementCost:
        """Price the whole step."""
        rows = self.vocab_rows(placement.widths)
        costs = self.sharded_as(placement)
        return self.combine(
            placement, tuple(costs.replica(r, rows) for r in placement.replicas), rows
        )

    def combine(
        self, placement: Placement, replicas: tuple[ReplicaCost, ...], vocab_rows: int
    ) -> PlacementCost:
        """Price the step of replicas that are priced already, in the placement's order."""
        lines: Mapping[str, float] = {}
        if self.cluster.has_lines:
            crossing = boundary_bytes(placement, replicas)
            lines = line_seconds(self.cluster, ((pair, size) for _, pair, size in crossing))
            lines = {**lines, **nic_seconds(self.cluster, placement, replicas)}
        carried = Carried(path_seconds(placement, replicas), lines)
        pipelines_s = max(carried.busiest_s, *(r.pipeline_s for r in replicas))
        ends = self._stage_ends(replicas, pipelines_s)
        return PlacementCost(
            replicas,
            carried.busiest_s,
            self._exchange.exposed_s(
                placement, vocab_rows, ends, pipelines_s, carried, self.rooms(replicas)
            ),
            max(s.update_s for r in replicas for s in r.stages),
        )

    def rooms(self, replicas: Sequence[ReplicaCost]) -> dict[StageId, int]:
        """Return the bytes of each stage's devices for gradients under way, by replica and
        stage."""
        overlaps = self.workload.training.overlap_grad_reduce
        known: dict[int, list[int]] = {}  # equal replicas are priced once
        for replica in replicas:
            if id(replica) not in known:
                known[id(replica)] = [
                    room_of(stage.memory, stage.num_layers, overlaps=overlaps)
                    for stage in replica.stages
                ]
        return {
            (r, s): room
            for r, replica in enumerate(replicas)
            for s, room in enumerate(known[id(replica)])
        }

    def traffic(
        self, placement: Placement, cost: PlacementCost
    ) -> Iterator[tuple[tuple[int, int] | None, NodePair, float]]:
        """Yield the transfers between nodes in a step: boundary as (replica, stage before it), or
        None for gradients; sender and receiver; bytes."""
        yield from boundary_bytes(placement, cost.replicas)
        plain = self._plain
        rows, links = plain.vocab_rows(placement.widths), plain.cluster.node_links
        for pair, seconds in plain._exchange.path_seconds(placement, rows).items():
            yield None, pair, seconds * links[pair].bytes_per_s

    def bytes_between_nodes(
        self, placement: Placement, cost: PlacementCost
    ) -> dict[NodePair, float]:
        """Sum the bytes of a step on each path between two nodes, boundaries and gradients."""
        found: dict[NodePair, float] = {}
        for _, pair, num_bytes in self.traffic(placement, cost):
            found[pair] = found.get(pair, 0.0) + num_bytes
        return found

    @property
    def _plain(self) -> Self:
        """Return the price list by latency and bandwidth alone, where seconds are bytes."""
        if self._of_plain_links is None:
            cluster = self.cluster.without_link_terms
            is_plain = cluster is self.cluster
            self._of_plain_links = (
                self if is_plain else type(self)(cluster, self.workload, self.profile)
            )
        return self._of_plain_links

    def sync_s(self, placement: Placement, vocab_rows: int) -> float:
        """Return the seconds of a placement's gradient exchange, hidden behind nothing."""
        replicas = [self.replica(replica, vocab_rows) for replica in placement.replicas]
        return self._exchange.alone_s(placement, vocab_rows, self.rooms(replicas))

    @cached_property
    def _exchange(self) -> GradientExchangePrices:
        training = self.workload.training
        states = state_bytes(training)
        weight_bytes = states.weight if training.use_distributed_optimizer else None
        if weight_bytes is not None and training.mixes_precisions:
            weight_bytes = _MAIN_WEIGHT_BYTES  # to holders in other precisions
        return GradientExchangePrices(
            self.cluster, self.workload.model, states.gradient, weight_bytes
        )

    def _stage_ends(self, replicas: tuple[ReplicaCost, ...], pipelines_s: float) -> list[StageEnd]:
        """Return the times from which stages may exchange gradients, in the layout's order: their
        passes are done and their sends have arrived.

        As in Megatron (`--align-grad-reduce`) only the first stage begins within its last backward
        pass.  Where the network sets the pace, all end with it.
        """
        overlap = self.workload.training.overlap_grad_reduce
        paced = pipelines_s > max(replica.pipeline_s for replica in replicas)
        ends = []
        for replica in replicas:
            for s, stage in enumerate(replica.stages):
                end_s = pipelines_s if paced else replica.ends_s[s]
                if s and not paced:
                    end_s += replica.backward_hops[s - 1].total_s
                backward_s = stage.times.backward_s if overlap and s == 0 else 0.0
                ends.append(StageEnd(end_s, backward_s))
        return ends

    def least_sync(self, node: Node, width: int, num_replicas: int) -> LeastSync:
        """Bound the exchange of a stage of `width` GPUs of a node from below: seconds between its
        last backward pass and the end of the step, with `num_replicas` replicas or more; zero where
        it may hide or is no all-reduce."""
        training, model = self.workload.training, self.workload.model
        if training.overlap_grad_reduce or training.use_distributed_optimizer:
            return NO_SYNC
        gradient_bytes = state_bytes(training).gradient
        return least_sync(self.cluster, model, node, width, num_replicas, gradient_bytes)

    def least_ends_sync(self, num_holders: int, cut: Cut) -> float:
        """Bound from below the seconds that the exchange of the word embedding adds to pipelines
        and update where its holders are on both sides of a cut.

        First stages hold their first layer too, and exchange it when all of them are done unless
        backward passes hide that; so do those of a tied embedding, but not with all its holders.
        """
        training, model = self.workload.training, self.workload.model
        states = state_bytes(training)
        weight_bytes = states.weight if training.use_distributed_optimizer else None
        num_params = model.vocab_size * model.hidden_size
        if not (model.tied_embeddings or training.overlap_grad_reduce):
            num_params += layer_params(model, even_share(model, 1)) + embedding_params(model, 1, 0)
        return least_ends_sync_s(num_params, num_holders, cut, states.gradient, weight_bytes)

    def _distinct(
        self, stage: PlacedStage, memories: Sequence[StageMemory]
    ) -> Iterable[tuple[StageMemory, GpuType]]:
        gpus = [self.cluster.gpu_type(device) for device in stage.devices]
        pairs = zip(memories, gpus, strict=True)
        return {
            (id(memory), gpu.name, gpu.memory_bytes): (memory, gpu) for memory, gpu in pairs
        }.values()


MakeCosts = Callable[[Cluster, Workload, Profile | None], CostModel]
"""Makes the prices of a planning question; the cluster's nodes are sorted by name."""
