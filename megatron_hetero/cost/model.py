"""One price list for a cluster and a workload: the cost of any placement, cached piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import ClassVar, Self

from megatron_hetero.cluster.node_links import NodePair
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.states import new_weight_bytes, state_bytes
from megatron_hetero.cost.network.lines import line_seconds
from megatron_hetero.cost.parameters import embedding_params, layer_params, matrix_params
from megatron_hetero.cost.pipeline import least_pipeline_time_s, stage_ends_s
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.stage_prices import StagePrices
from megatron_hetero.cost.step_cost import (
    PlacementCost,
    ReplicaCost,
    boundary_bytes,
    nic_seconds,
    path_seconds,
)
from megatron_hetero.cost.sync.buckets import StageId
from megatron_hetero.cost.sync.gradients import Carried, FirstForward, StageEnd
from megatron_hetero.cost.sync.least import (
    NO_SYNC,
    Cut,
    LeastSync,
    least_ends_sync_s,
    least_sync,
)
from megatron_hetero.cost.sync.room import room_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.model.spec import Workload


class CostModel(StagePrices):
    """Prices of a workload on a cluster. Pure: equal questions get equal answers.

    Other prices are a subclass (`MakeCosts`): the search asks for unit prices where it builds
    plans, and for `replica` and `combine` where it compares them.
    """

    has_variants: ClassVar[bool] = True
    """True if the model prices unequal shares, settings of single stages and replicas, launch
    counts and queues.  False for prices of other pipelines: the search then gives a stage the job's
    own settings, adds `send_loads_s` to its time, and takes `quick_times_s` of the pipeline."""

    @property
    def has_launch_counts(self) -> bool:
        """Return whether launch counts in place of 1F1B's can make the pipelines faster: not where
        senders wait for receivers, which then may wait for them (`schedule.check`)."""
        return self.has_variants and not self.workload.training.waits_for_receivers

    def replica(self, replica: PlacedReplica, vocab_rows: int) -> ReplicaCost:
        """Price the stages, the hops and the pipeline of one replica.

        With the distributed optimizer, ask `sharded_as(placement)`: its memory depends on all
        replicas.
        """
        # Stages in their own settings, then both directions of each boundary.
        stages = tuple(
            self.stage(replica, index, vocab_rows) for index in range(len(replica.stages))
        )
        costs = self.variant(micro_batch_size=replica.micro_batch_size)
        forward = tuple(costs.stage_hop(a, b) for a, b in pairwise(replica.stages))
        backward = tuple(costs.stage_hop(b, a) for a, b in pairwise(replica.stages))
        # Seconds of the pipeline, exactly and as a bound for any launch counts.
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
        # Lines that paths share, and NICs: seconds of all boundaries of a step on each.
        lines: Mapping[str, float] = {}
        if self.cluster.has_lines:
            crossing = boundary_bytes(placement, replicas)
            lines = line_seconds(self.cluster, ((pair, size) for _, pair, size in crossing))
            lines = {**lines, **nic_seconds(self.cluster, placement, replicas)}
        # A path or line that is busy for longer than any pipeline sets the pace of all.
        carried = Carried(path_seconds(placement, replicas), lines)
        pipelines_s = max(carried.busiest_s, *(r.pipeline_s for r in replicas))
        # The exchange of gradients starts as stages end, and shares paths with boundaries.
        ends = self._stage_ends(placement, replicas, pipelines_s)
        return PlacementCost(
            replicas,
            carried.busiest_s,
            self._exchange.exposed_s(
                placement,
                vocab_rows,
                ends,
                pipelines_s,
                carried,
                self.rooms(replicas),
                self._forwards(replicas),
            ),
            max(replica.update_s for replica in replicas),
        )

    def rooms(self, replicas: Sequence[ReplicaCost]) -> dict[StageId, int]:
        """Return the bytes of each stage's devices for gradients under way, by replica and
        stage."""
        overlaps = self.workload.training.overlap_grad_reduce
        # By identity, since equal replicas of a placement share one cost.
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
        # Boundaries are known in bytes; on plain links seconds times bandwidth are bytes too.
        yield from boundary_bytes(placement, cost.replicas)
        plain = self._plain
        rows, links = plain.vocab_rows(placement.widths), plain.cluster.node_links
        for pair, seconds in plain._exchange.path_seconds(placement, rows).items():
            yield None, pair, seconds * links[pair].bytes_per_s

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

    def _stage_ends(
        self, placement: Placement, replicas: tuple[ReplicaCost, ...], pipelines_s: float
    ) -> list[StageEnd]:
        """Return the times from which stages may exchange gradients, in the layout's order: their
        passes are done and their sends have arrived.

        As in Megatron (`--align-grad-reduce`) only the first stage begins within its last backward
        pass, and none does where replicas give sharded layers to others after their passes.  Where
        the network sets the pace, all end with it.
        """
        # Without --overlap-grad-reduce no exchange begins within a backward pass.
        overlap = self.workload.training.overlap_grad_reduce and not placement.has_idle_rounds
        paced = pipelines_s > max(replica.pipeline_s for replica in replicas)
        ends = []
        for replica in replicas:
            for s, stage in enumerate(replica.stages):
                end_s = pipelines_s if paced else replica.ends_s[s]
                # Its last gradient must have reached the stage before.
                if s and not paced:
                    end_s += replica.backward_hops[s - 1].total_s
                backward_s = stage.times.backward_s if overlap and s == 0 else 0.0
                ends.append(StageEnd(end_s, backward_s))
        return ends

    def _forwards(self, replicas: tuple[ReplicaCost, ...]) -> list[FirstForward]:
        """Return the first forward pass of every stage, in the layout's order, if new weights
        travel meanwhile."""
        found: list[FirstForward] = []
        if not self.workload.training.hides_gathers:
            return found
        for replica in replicas:
            start_s = 0.0
            hops_s = [*(hop.total_s for hop in replica.forward_hops), 0.0]
            for stage, hop_s in zip(replica.stages, hops_s, strict=True):
                found.append(FirstForward(start_s, stage.times.forward_s))
                start_s += stage.times.forward_s + hop_s
        return found

    def least_sync(self, node: Node, width: int, num_replicas: int) -> LeastSync:
        """Bound the exchange of a stage of `width` GPUs of a node from below: seconds between its
        last backward pass and the end of the step, with `num_replicas` replicas or more; zero where
        it may hide or is no all-reduce."""
        training, model = self.workload.training, self.workload.model
        # An exchange that may hide behind backward passes bounds nothing.
        if training.overlap_grad_reduce or training.use_distributed_optimizer:
            return NO_SYNC
        gradient_bytes = state_bytes(training).gradient
        return least_sync(self.cluster, model, node, width, num_replicas, gradient_bytes)

    def least_ends_sync(self, num_holders: int, cut: Cut) -> float:
        """Bound from below the seconds added to pipelines and update by the exchange of a word
        embedding with holders on both sides of a cut.

        First stages hold their first layer too, and exchange it when all of them are done unless
        backward passes hide that; so do those of a tied embedding, but not with all its holders.
        """
        training, model = self.workload.training, self.workload.model
        num_params, in_matrices = model.vocab_size * model.hidden_size, 0
        # An untied embedding is exchanged with the first layer, which its stage holds too.
        if not (model.tied_embeddings or training.overlap_grad_reduce):
            num_params += layer_params(model, even_share(model, 1)) + embedding_params(model, 1, 0)
            in_matrices = matrix_params(model, even_share(model, 1))
        # The distributed optimizer gathers new weights; without it gradients alone travel.
        weight_bytes = None
        if training.use_distributed_optimizer:
            new = new_weight_bytes(training, num_params, in_matrices)
            weight_bytes = 0 if training.hides_gathers else new / num_params
        gradient_bytes = state_bytes(training).gradient
        return least_ends_sync_s(num_params, num_holders, cut, gradient_bytes, weight_bytes)


MakeCosts = Callable[[Cluster, Workload, Profile | None], CostModel]
"""Makes the prices of a planning question; the cluster's nodes are sorted by name."""
