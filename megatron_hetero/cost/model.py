"""One price list for a cluster and a workload: what any placement costs, cached piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_hetero.cluster.spec import Cluster, Device, Node
from megatron_hetero.cost import compute
from megatron_hetero.cost.compute import ELEMENT_BYTES, PassTimes
from megatron_hetero.cost.memory import (
    StageMemory,
    stage_memory,
    stage_params,
    state_bytes,
)
from megatron_hetero.cost.network import BoundaryTime, boundary_time, tensor_parallel_times
from megatron_hetero.cost.pipeline import pipeline_time_s, steady_period_s
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.profile import Piece, Profile
from megatron_hetero.cost.sync import gradient_sync_s
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

    @property
    def missing_bytes(self) -> int:
        """Bytes that each device lacks; zero or less when the stage fits."""
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

    def __init__(self, cluster: Cluster, workload: Workload, profile: Profile | None = None):
        self.cluster = cluster
        self.workload = workload
        self.profile = profile
        self._pieces: dict[tuple[str, int, int], PieceTimes] = {}
        self._memories: dict[tuple[str, int, bool, bool, int, int, int | None], StageMemory] = {}
        self._hops: dict[tuple[str, str, int, int], BoundaryTime] = {}

    @cached_property
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
        """Times of the model's pieces on a group of `width` GPUs of one node."""
        key = (node.name, width, vocab_rows)
        if key not in self._pieces:
            self._pieces[key] = self._price_pieces(node, width, vocab_rows)
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
    ) -> StageMemory:
        """Memory of one GPU of a stage, as a function of its layers; see `stage_memory`."""
        key = (node.gpu_type.name, width, first, last, num_in_flight, vocab_rows, num_sends_kept)
        if key not in self._memories:
            self._memories[key] = stage_memory(
                self.workload,
                node.gpu_type,
                width,
                first=first,
                last=last,
                num_in_flight=num_in_flight,
                vocab_rows=vocab_rows,
                reserve_bytes=self.cluster.limits.memory_reserve_bytes,
                num_sends_kept=num_sends_kept,
            )
        return self._memories[key]

    def hop(self, senders: Sequence[Device], receivers: Sequence[Device]) -> BoundaryTime:
        """One crossing of a stage boundary."""
        key = (senders[0].node, receivers[0].node, len(senders), len(receivers))
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

        None here: the runtime sends beside computation.
        """
        return (0.0,) * len(groups)

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

    def stage(self, replica: PlacedReplica, index: int, rows: int) -> StageCost:
        """Stage `index` of a replica."""
        stage = replica.stages[index]
        node = self.cluster.node_by_name[stage.devices[0].node]
        first, last = index == 0, index == len(replica.stages) - 1
        pieces = self.pieces(node, stage.width, rows)
        model, training = self.workload.model, self.workload.training
        num_params = stage_params(model, stage.width, stage.num_layers, first, last, rows)
        return StageCost(
            pieces.stage(stage.num_layers, first, last),
            stage.num_layers * pieces.communication.total_s,
            compute.update_time_s(num_params, training, node.gpu_type, state_bytes(training).total),
            self.stage_memory(replica, index, rows),
            stage.num_layers,
            pieces.measured,
        )

    def stage_memory(self, replica: PlacedReplica, index: int, rows: int) -> StageMemory:
        """Memory of one GPU of stage `index`.

        With launch counts of its own a replica runs in our runtime, which keeps a sent tensor until
        as many later ones are sent as its sender launches ahead (`runtime.boundary`).
        """
        stage, num_in_flight = replica.stages[index], replica.num_in_flight
        first, last = index == 0, index == len(replica.stages) - 1
        num_sends_kept = None
        if replica.launch_counts is not None:
            num_sends_kept = 0 if last else num_in_flight[index]
            num_sends_kept += 0 if first else num_in_flight[index - 1]
        node = self.cluster.node_by_name[stage.devices[0].node]
        return self.memory(
            node, stage.width, first, last, num_in_flight[index], rows, num_sends_kept
        )

    def replica(self, replica: PlacedReplica, vocab_rows: int) -> ReplicaCost:
        """Stages, hops and pipeline time of one replica."""
        stages = tuple(
            self.stage(replica, index, vocab_rows) for index in range(len(replica.stages))
        )
        devices = [stage.devices for stage in replica.stages]
        forward = tuple(self.hop(a, b) for a, b in pairwise(devices))
        backward = tuple(self.hop(b, a) for a, b in pairwise(devices))
        pipeline_s = pipeline_time_s(
            [s.times for s in stages],
            forward,
            backward,
            replica.num_micro_batches,
            replica.num_in_flight,
        )
        return ReplicaCost(stages, forward, backward, pipeline_s)

    def placement(self, placement: Placement) -> PlacementCost:
        """The whole step."""
        rows = self.vocab_rows(placement.widths)
        return self.combine(
            placement, tuple(self.replica(r, rows) for r in placement.replicas), rows
        )

    def combine(
        self, placement: Placement, replicas: tuple[ReplicaCost, ...], vocab_rows: int
    ) -> PlacementCost:
        """The step of replicas that are priced already."""
        return PlacementCost(
            replicas,
            _busiest_card_s(placement, replicas),
            self.sync_s(placement, vocab_rows),
            max(s.update_s for r in replicas for s in r.stages),
        )

    def sync_s(self, placement: Placement, vocab_rows: int) -> float:
        """Seconds of the gradient exchange of a placement."""
        gradient_bytes = state_bytes(self.workload.training).gradient
        model = self.workload.model
        return gradient_sync_s(placement, self.cluster, model, vocab_rows, gradient_bytes)

    def _price_pieces(self, node: Node, width: int, vocab_rows: int) -> PieceTimes:
        workload, gpu = self.workload, node.gpu_type
        training = workload.training
        comm = tensor_parallel_times(
            self.activation_bytes,
            width,
            node.link if width > 1 else None,
            training.sequence_parallel,
            training.micro_batch_size * workload.model.seq_length,
        )
        layer_comm = PassTimes(comm.layer_forward_s, comm.layer_backward_s)
        if training.recompute == "full":
            layer_comm = PassTimes(
                comm.layer_forward_s, comm.layer_backward_s + comm.layer_forward_s
            )
        analytic: dict[Piece, PassTimes] = {
            "embedding": compute.embedding_times(workload, gpu, width, vocab_rows)
            + PassTimes(comm.embedding_s, 0.0),
            "decoder_layer": compute.layer_times(workload, gpu, width) + layer_comm,
            "head": compute.head_times(workload, gpu, width, vocab_rows)
            + PassTimes(comm.head_forward_s, comm.head_backward_s),
        }
        profile = self.profile
        found = {
            piece: profile.times(workload, gpu.name, width, piece) if profile else None
            for piece in analytic
        }
        times = {piece: found[piece] or analytic[piece] for piece in analytic}
        return PieceTimes(
            times["embedding"],
            times["decoder_layer"],
            times["head"],
            PassTimes(0.0, 0.0) if found["decoder_layer"] else layer_comm,
            all(value is not None for value in found.values()),
        )


MakeCosts = Callable[[Cluster, Workload, Profile | None], CostModel]
"""Makes the prices of a planning question; the cluster's nodes are sorted by name."""


def _busiest_card_s(placement: Placement, replicas: tuple[ReplicaCost, ...]) -> float:
    """Seconds for which the busiest path between two nodes, in one direction, is taken."""
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
    return max(card_s.values(), default=0.0)
