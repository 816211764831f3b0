"""One price list for a cluster and a workload: what any placement costs, cached piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar

from megatron_hetero.cluster.spec import Cluster, Device, GpuType, Link, Node
from megatron_hetero.cost.bound_rules import FillRules
from megatron_hetero.cost.compute import (
    ELEMENT_BYTES,
    PassTimes,
    embedding_times,
    group_layer_times,
    head_times,
    slowest,
    update_time_s,
)
from megatron_hetero.cost.memory import (
    EVERY_DEVICE,
    StageMemory,
    StateHolders,
    stage_memory,
    state_bytes,
    tightest,
    updated_bytes,
    with_some_layers_recomputed,
)
from megatron_hetero.cost.network import (
    BoundaryTime,
    boundary_time,
    slowest_link,
    tensor_parallel_times,
)
from megatron_hetero.cost.pipeline import pipeline_time_s, steady_period_s
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement, Recompute
from megatron_hetero.cost.profile import Piece, Profile
from megatron_hetero.cost.share import (
    TensorShare,
    even_share,
    even_share_or_none,
    member_shares,
)
from megatron_hetero.cost.sync import (
    NO_SYNC,
    GradientExchange,
    LeastSync,
    StageEnd,
    StageId,
    least_sync,
)
from megatron_hetero.cost.widths import usable_widths
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import Workload


@dataclass(frozen=True)
class PieceTimes:
    """Embedding, one decoder layer and head at one width, TP communication included.

    `communication` is the part of `layer` that is communication (zero when it was measured whole).
    """

    embedding: PassTimes
    layer: PassTimes
    head: PassTimes
    communication: PassTimes
    measured: bool

    def stage(self, num_layers: int, first: bool, last: bool) -> PassTimes:
        """Times of `num_layers` layers with the ends of the model that the stage holds."""
        times = self.layer.times(num_layers)
        times = times + self.embedding if first else times
        return times + self.head if last else times


@dataclass(frozen=True)
class StageCost:
    """One stage: its times for a micro-batch, its update once a step, its memory."""

    times: PassTimes
    tensor_parallel_s: float
    update_s: float
    memory: StageMemory
    num_layers: int
    measured: bool
    unlike_memories: tuple[StageMemory, ...] = ()
    """Of each device, in rank order, where they differ; `memory` is then the tightest of them."""

    def device_memory(self, tensor_rank: int) -> StageMemory:
        """Memory of one device of the stage."""
        return self.unlike_memories[tensor_rank] if self.unlike_memories else self.memory

    @property
    def missing_bytes(self) -> int:
        """Bytes that the tightest device lacks; zero or less when the stage fits."""
        return self.memory.peak_bytes(self.num_layers) - self.memory.capacity_bytes


@dataclass(frozen=True)
class ReplicaCost:
    """The stages of one replica, its hops in both directions, and its pipeline's makespan."""

    stages: tuple[StageCost, ...]
    forward_hops: tuple[BoundaryTime, ...]
    backward_hops: tuple[BoundaryTime, ...]
    pipeline_s: float


@dataclass(frozen=True)
class PlacementCost:
    """A step is: all pipelines, the gradient exchange, the slowest update.

    `card_s`: what the busiest network path carries of all replicas' boundaries in a step.
    """

    replicas: tuple[ReplicaCost, ...]
    card_s: float
    gradient_sync_s: float
    update_s: float

    @property
    def pipelines_s(self) -> float:
        """Until the last replica ends; replicas that cross the same path take turns on it."""
        return max(self.card_s, *(r.pipeline_s for r in self.replicas))

    @property
    def step_time_s(self) -> float:
        """Seconds of one optimizer step."""
        return self.pipelines_s + self.gradient_sync_s + self.update_s

    @property
    def missing_bytes(self) -> int:
        """Most bytes that any device lacks; zero or less when the placement fits."""
        return max(s.missing_bytes for r in self.replicas for s in r.stages)

    @property
    def measured(self) -> bool:
        """Whether every time used was measured."""
        return all(s.measured for r in self.replicas for s in r.stages)


class CostModel:
    """Prices of one workload on one cluster.  Pure: equal questions get equal answers.

    Other prices are a subclass (`MakeCosts`): the search asks for `widths`, `pieces`, `memory`,
    `send_loads_s` and `quick_times_s` where it builds plans, and for `replica` and `combine` where
    it compares them.
    """

    has_launch_counts: ClassVar[bool] = True
    """Whether launch counts other than 1F1B's own can make its pipelines faster."""
    has_variants: ClassVar[bool] = True
    """Whether it prices unequal shares, and replicas or stages whose micro-batch size or recompute
    are not the job's."""

    def __init__(self, cluster: Cluster, workload: Workload, profile: Profile | None = None):
        self.cluster = cluster
        self.workload = workload
        self.profile = profile
        self.holders = EVERY_DEVICE
        self._variants: dict[tuple[int, Recompute, StateHolders], CostModel] = {}
        self._forget()

    def _forget(self) -> None:
        self._pieces: dict[tuple[object, ...], PieceTimes] = {}
        self._memories: dict[tuple[object, ...], StageMemory] = {}
        self._hops: dict[tuple[object, ...], BoundaryTime] = {}

    def variant(
        self,
        *,
        micro_batch_size: int | None = None,
        recompute: Recompute | None = None,
        holders: StateHolders | None = None,
    ) -> CostModel:
        """The price list of the same job for replicas or stages with a micro-batch size or
        recompute of their own, or with optimizer states divided among `holders`; None is as
        here."""
        training = self.workload.training
        own = (training.micro_batch_size, training.recompute, self.holders)
        key = (
            micro_batch_size or training.micro_batch_size,
            recompute or training.recompute,
            holders or self.holders,
        )
        if key == own:
            return self
        if key not in self._variants:
            made = copy(self)
            changed = replace(training, micro_batch_size=key[0], recompute=key[1])
            made.workload = replace(self.workload, training=changed)
            made.holders = key[2]
            made._forget()
            self._variants[key] = made
        return self._variants[key]

    def sharded_as(self, placement: Placement) -> CostModel:
        """The price list with optimizer states divided as the replicas of `placement` do; itself
        without the distributed optimizer."""
        if not self.workload.training.use_distributed_optimizer:
            return self
        return self.variant(
            holders=StateHolders(
                len(placement.replicas), sum(min(len(r.stages), 2) for r in placement.replicas)
            )
        )

    def sharded_among(self, num_replicas: int) -> CostModel:
        """The price list for placements of so many replicas whose depth is not known yet: the
        states of a tied embedding divided among as many stages as can hold it."""
        if not self.workload.training.use_distributed_optimizer:
            return self
        return self.variant(holders=StateHolders(num_replicas, 2 * num_replicas))

    @property
    def activation_bytes(self) -> int:
        """Size of the tensor that crosses a stage boundary for one micro-batch."""
        model, training = self.workload.model, self.workload.training
        tokens = training.micro_batch_size * model.seq_length
        return tokens * model.hidden_size * ELEMENT_BYTES[training.precision]

    def widths(self, node: Node) -> tuple[int, ...]:
        """Tensor-parallel widths that this model can price on a node, ascending."""
        return usable_widths(self.cluster, self.workload, node)

    def vocab_rows(self, widths: Sequence[int]) -> int:
        """Rows of the padded vocabulary for a plan of these widths."""
        return padded_vocab_size(self.workload.model, tuple(widths))

    def pieces(self, node: Node, width: int, vocab_rows: int) -> PieceTimes:
        """Times of the model's pieces on a group of `width` GPUs of one node, in equal shares."""
        key = (node.name, width, vocab_rows)
        if key not in self._pieces:
            member = (node.gpu_type, even_share(self.workload.model, width))
            self._pieces[key] = self._price_pieces((member,), node.link, vocab_rows)
        return self._pieces[key]

    def group_pieces(
        self, devices: Sequence[Device], shares: tuple[int, ...] | None, vocab_rows: int
    ) -> PieceTimes:
        """Times of the model's pieces on a group of any devices, in any shares."""
        nodes = tuple(device.node for device in devices)
        if shares is None and len(set(nodes)) == 1:
            return self.pieces(self.cluster.node_by_name[nodes[0]], len(devices), vocab_rows)
        key = (nodes, shares, vocab_rows)
        if key not in self._pieces:
            members = zip(
                [self.cluster.gpu_type(device) for device in devices],
                member_shares(self.workload.model, len(devices), shares),
                strict=True,
            )
            link = slowest_link(self.cluster, devices)
            self._pieces[key] = self._price_pieces(tuple(members), link, vocab_rows)
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
        """Memory of one GPU of a stage, as a function of its layers; see `stage_memory`.

        `share`: what it holds of a group of `width` in unequal shares.
        """
        share = share or even_share(self.workload.model, width)
        key = (
            node.gpu_type.name,
            share,
            first,
            last,
            num_in_flight,
            vocab_rows,
            num_sends_kept,
        )
        if key not in self._memories:
            self._memories[key] = stage_memory(
                self.workload,
                node.gpu_type,
                share,
                first=first,
                last=last,
                num_in_flight=num_in_flight,
                vocab_rows=vocab_rows,
                reserve_bytes=self.cluster.limits.memory_reserve_bytes,
                num_sends_kept=num_sends_kept,
                holders=self.holders,
            )
        return self._memories[key]

    def hop(self, senders: Sequence[Device], receivers: Sequence[Device]) -> BoundaryTime:
        """One crossing of a stage boundary."""
        key = (*(d.node for d in senders), "to", *(d.node for d in receivers))
        if key not in self._hops:
            self._hops[key] = boundary_time(
                self.cluster,
                senders,
                receivers,
                self.activation_bytes,
                self.workload.training.sequence_parallel,
            )
        return self._hops[key]

    def send_loads_s(self, groups: Sequence[Sequence[Device]]) -> tuple[float, ...]:
        """Seconds of each micro-batch for which messages keep a stage from computing, [stage].

        The sum of `hop_loads_s` over each stage's boundaries.
        """
        loads_s = [0.0] * len(groups)
        for index, (senders, receivers) in enumerate(pairwise(groups)):
            for stage, load_s in enumerate(self.hop_loads_s(senders, receivers), index):
                loads_s[stage] += load_s
        return tuple(loads_s)

    def hop_loads_s(
        self, senders: Sequence[Device], receivers: Sequence[Device]
    ) -> tuple[float, float]:
        """What one boundary, in both directions, adds to the time of the stage before it and of the
        stage behind it.

        Nothing here: the runtime sends beside computation.
        """
        return 0.0, 0.0

    def fill_rules(self) -> FillRules | None:
        """What its pipelines take at least, for the lower bound, where their stages wait for each
        other; None where a stage may launch ahead, as in the runtime."""
        return None

    def quick_times_s(
        self, stage_times_s: Sequence[float], groups: Sequence[Sequence[Device]]
    ) -> tuple[float, float]:
        """About the seconds of a replica's first micro-batch, there and back, and of each further.

        Args:
            stage_times_s: forward plus backward of one micro-batch, shape [stage].
            groups: the devices of each stage, shape [stage][tensor rank].
        """
        hops = [(self.hop(a, b), self.hop(b, a)) for a, b in pairwise(groups)]
        round_trips_s = [there.total_s + back.total_s for there, back in hops]
        busiest_s = max(
            (max(there.serialisation_s, back.serialisation_s) for there, back in hops),
            default=0.0,
        )
        fill_s = sum(stage_times_s) + sum(round_trips_s)
        return fill_s, steady_period_s(stage_times_s, round_trips_s, busiest_s)

    def _of_stage(self, replica: PlacedReplica, index: int) -> CostModel:
        """The price list with what stage `index` does unlike the rest of the job; its recompute is
        left to `stage`."""
        parts = replica.stages[index].state_parts
        holders = None
        if parts is not None and self.workload.training.use_distributed_optimizer:
            holders = StateHolders(1 / parts[0], 1 / parts[1])
        return self.variant(micro_batch_size=replica.micro_batch_size, holders=holders)

    def stage(self, replica: PlacedReplica, index: int, rows: int) -> StageCost:
        """Stage `index` of a replica."""
        costs = self._of_stage(replica, index)
        if costs is not self:
            return costs.stage(replica, index, rows)
        stage = replica.stages[index]
        first, last = index == 0, index == len(replica.stages) - 1
        costs = self.variant(recompute=stage.recompute)
        pieces = costs.group_pieces(stage.devices, stage.shares, rows)
        times = pieces.stage(stage.num_layers, first, last)
        communication = pieces.communication.times(stage.num_layers)
        if stage.recompute_num_layers is not None:
            num_kept = stage.num_layers - stage.recompute_num_layers
            plain = self.variant(recompute="none").group_pieces(stage.devices, stage.shares, rows)
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

    def stage_memory(self, replica: PlacedReplica, index: int, rows: int) -> StageMemory:
        """Memory of the GPU of stage `index` that has the least to spare."""
        memories = self.stage_memories(replica, index, rows)
        return tightest(memories, replica.stages[index].num_layers)

    def stage_memories(
        self, replica: PlacedReplica, index: int, rows: int
    ) -> tuple[StageMemory, ...]:
        """Memory of each GPU of stage `index`, in rank order; equal ones are one object.

        With launch counts of its own a replica runs in our runtime, which keeps a sent tensor until
        as many later ones are sent as its sender launches ahead (`runtime.boundary`).
        """
        costs = self._of_stage(replica, index)
        if costs is not self:
            return costs.stage_memories(replica, index, rows)
        stage, num_in_flight = replica.stages[index], replica.num_in_flight
        first, last = index == 0, index == len(replica.stages) - 1
        num_sends_kept = None
        if replica.launch_counts is not None:
            num_sends_kept = 0 if last else num_in_flight[index]
            num_sends_kept += 0 if first else num_in_flight[index - 1]
            # Its receives are posted ahead (`schedule.delivery`): of each neighbour one more than
            # the launch counts differ, of which `stage_memory` has the one itself.
            for before, after in pairwise(num_in_flight[max(index - 1, 0) : index + 2]):
                num_sends_kept += max(before - after, 0)
        model, made = self.workload.model, dict[tuple[str, TensorShare], StageMemory]()
        some = stage.recompute_num_layers
        found = []
        shares = member_shares(model, stage.width, stage.shares)
        for device, share in zip(stage.devices, shares, strict=True):
            node = self.cluster.node_by_name[device.node]
            key = (node.gpu_type.name, share)
            if key not in made:
                asked = (
                    *(node, stage.width, first, last, num_in_flight[index], rows),
                    *(num_sends_kept, share),
                )
                memory = self.variant(recompute=stage.recompute).memory(*asked)
                if some is not None:
                    kept = self.variant(recompute="none").memory(*asked)
                    memory = with_some_layers_recomputed(kept, memory, some)
                made[key] = memory
            found.append(made[key])
        return tuple(found)

    def replica(self, replica: PlacedReplica, vocab_rows: int) -> ReplicaCost:
        """Stages, hops and pipeline time of one replica.

        With the distributed optimizer, ask `sharded_as(placement)`: its memory depends on all
        replicas.
        """
        stages = tuple(
            self.stage(replica, index, vocab_rows) for index in range(len(replica.stages))
        )
        devices = [stage.devices for stage in replica.stages]
        costs = self.variant(micro_batch_size=replica.micro_batch_size)
        forward = tuple(costs.hop(a, b) for a, b in pairwise(devices))
        backward = tuple(costs.hop(b, a) for a, b in pairwise(devices))
        pipeline_s = pipeline_time_s(
            [s.times for s in stages],
            forward,
            backward,
            replica.num_micro_batches,
            # An order of its own (`plan.order`) may hold more on a later stage; 1F1B cannot.
            tuple(accumulate(replica.num_in_flight, min)),
        )
        return ReplicaCost(stages, forward, backward, pipeline_s)

    def placement(self, placement: Placement) -> PlacementCost:
        """The whole step."""
        rows = self.vocab_rows(placement.widths)
        costs = self.sharded_as(placement)
        return self.combine(
            placement, tuple(costs.replica(r, rows) for r in placement.replicas), rows
        )

    def combine(
        self, placement: Placement, replicas: tuple[ReplicaCost, ...], vocab_rows: int
    ) -> PlacementCost:
        """The step of replicas that are priced already."""
        card_s = _busiest_card_s(placement, replicas)
        pipelines_s = max(card_s, *(r.pipeline_s for r in replicas))
        return PlacementCost(
            replicas,
            card_s,
            self._exchange.exposed_s(
                placement, vocab_rows, self._stage_ends(replicas, pipelines_s), pipelines_s
            ),
            max(s.update_s for r in replicas for s in r.stages),
        )

    def bytes_between_nodes(
        self, placement: Placement, cost: PlacementCost
    ) -> dict[tuple[str, str], float]:
        """Bytes of a step on each path between two nodes: boundaries and gradient exchange."""
        seconds = _path_seconds(placement, cost.replicas)
        for group in self._exchange.groups(placement, self.vocab_rows(placement.widths)):
            for path, path_s in group.path_s.items():
                seconds[path] = seconds.get(path, 0.0) + path_s
        links = self.cluster.node_links
        return {path: path_s * links[path].bytes_per_s for path, path_s in seconds.items()}

    def sync_s(self, placement: Placement, vocab_rows: int) -> float:
        """Seconds of the gradient exchange of a placement, hidden behind nothing."""
        return self._exchange.alone_s(placement, vocab_rows)

    @cached_property
    def _exchange(self) -> GradientExchange:
        training = self.workload.training
        states = state_bytes(training)
        weight_bytes = states.weight if training.use_distributed_optimizer else None
        return GradientExchange(self.cluster, self.workload.model, states.gradient, weight_bytes)

    def _stage_ends(
        self, replicas: tuple[ReplicaCost, ...], pipelines_s: float
    ) -> dict[StageId, StageEnd]:
        """When stages may begin to exchange gradients.

        The last gradient still has to pass the stages before this one.  As in Megatron
        (`--align-grad-reduce`) only the first stage begins within its last backward pass.  Where
        the network sets the pace, all end with it.
        """
        overlap = self.workload.training.overlap_grad_reduce
        paced = pipelines_s > max(replica.pipeline_s for replica in replicas)
        ends = {}
        for r, replica in enumerate(replicas):
            left_s = 0.0
            for s, stage in enumerate(replica.stages):
                end_s = pipelines_s if paced else replica.pipeline_s - left_s
                hidden_s = stage.times.backward_s * (1 - 1 / stage.num_layers)
                ends[r, s] = StageEnd(end_s, hidden_s if overlap and s == 0 else 0.0)
                if s < len(replica.backward_hops):
                    left_s += stage.times.backward_s + replica.backward_hops[s].total_s
        return ends

    def least_sync(self, node: Node, width: int, num_replicas: int) -> LeastSync:
        """What a stage of `width` GPUs of a node exchanges at least between its own last backward
        pass and the end of a step, in any placement of so many replicas or more; nothing where
        that may hide or is no all-reduce.  The lower bound counts on it."""
        training, model = self.workload.training, self.workload.model
        if training.overlap_grad_reduce or training.use_distributed_optimizer:
            return NO_SYNC
        gradient_bytes = state_bytes(training).gradient
        return least_sync(self.cluster, model, node, width, num_replicas, gradient_bytes)

    def _distinct(
        self, stage: PlacedStage, memories: Sequence[StageMemory]
    ) -> Iterable[tuple[StageMemory, GpuType]]:
        gpus = [self.cluster.gpu_type(device) for device in stage.devices]
        pairs = zip(memories, gpus, strict=True)
        return {(id(memory), gpu.name): (memory, gpu) for memory, gpu in pairs}.values()

    def _price_pieces(
        self, members: tuple[tuple[GpuType, TensorShare], ...], link: Link, vocab_rows: int
    ) -> PieceTimes:
        workload = self.workload
        training = workload.training
        width = members[0][1].width
        comm = tensor_parallel_times(
            self.activation_bytes,
            width,
            link if width > 1 else None,
            training.sequence_parallel,
            training.micro_batch_size * workload.model.seq_length,
        )
        layer_comm = PassTimes(comm.layer_forward_s, comm.layer_backward_s)
        if training.recompute == "full":
            layer_comm = PassTimes(
                comm.layer_forward_s, comm.layer_backward_s + comm.layer_forward_s
            )
        # Each member prices a vocabulary of which an even share is what it holds.
        rows_of = [share.rows_as_if_even(workload.model, vocab_rows) for _, share in members]
        priced = list(zip(members, rows_of, strict=True))
        analytic: dict[Piece, PassTimes] = {
            "embedding": slowest(
                [embedding_times(workload, gpu, width, rows) for (gpu, _), rows in priced]
            )
            + PassTimes(comm.embedding_s, 0.0),
            "decoder_layer": group_layer_times(workload, members) + layer_comm,
            "head": slowest([head_times(workload, gpu, width, rows) for (gpu, _), rows in priced])
            + PassTimes(comm.head_forward_s, comm.head_backward_s),
        }
        found = {piece: self._measured(piece, members) for piece in analytic}
        times = {piece: found[piece] or analytic[piece] for piece in analytic}
        is_even = len({share for _, share in members}) == 1
        return PieceTimes(
            times["embedding"],
            times["decoder_layer"],
            times["head"],
            PassTimes(0.0, 0.0) if found["decoder_layer"] else layer_comm,
            is_even and all(value is not None for value in found.values()),
        )

    def _measured(
        self, piece: Piece, members: Sequence[tuple[GpuType, TensorShare]]
    ) -> PassTimes | None:
        """A piece from the profile, where it has it for every GPU of the group.

        A layer was measured in equal shares; a member with a share of its own takes as much longer
        or shorter as the analytic model says.
        """
        found = []
        for gpu, share in members:
            even = even_share_or_none(self.workload.model, share.width)
            measured = self.profile and self.profile.times(
                self.workload, gpu.name, share.width, piece
            )
            if not measured:
                return None
            if piece == "decoder_layer" and share != even:
                if even is None:
                    return None
                own = group_layer_times(self.workload, [(gpu, share)])
                usual = group_layer_times(self.workload, [(gpu, even)])
                measured = PassTimes(
                    measured.forward_s * own.forward_s / usual.forward_s,
                    measured.backward_s * own.backward_s / usual.backward_s,
                )
            found.append(measured)
        return slowest(found)


MakeCosts = Callable[[Cluster, Workload, Profile | None], CostModel]
"""Makes the prices of a planning question; the cluster's nodes are sorted by name."""


def _busiest_card_s(placement: Placement, replicas: tuple[ReplicaCost, ...]) -> float:
    """Seconds for which the busiest path between two nodes, in one direction, is taken."""
    return max(_path_seconds(placement, replicas).values(), default=0.0)


def _path_seconds(
    placement: Placement, replicas: tuple[ReplicaCost, ...]
) -> dict[tuple[str, str], float]:
    """Seconds for which boundaries take each path between two nodes in a step."""
    card_s: dict[tuple[str, str], float] = {}
    for placed, cost in zip(placement.replicas, replicas, strict=True):
        nodes = [stage.devices[0].node for stage in placed.stages]
        for i, (here, there) in enumerate(pairwise(nodes)):
            if here == there:
                continue
            for path, hop in (
                ((here, there), cost.forward_hops[i]),
                ((there, here), cost.backward_hops[i]),
            ):
                busy_s = placed.num_micro_batches * hop.serialisation_s
                card_s[path] = card_s.get(path, 0.0) + busy_s
    return card_s
