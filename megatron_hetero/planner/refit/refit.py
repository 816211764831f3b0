"""A placement fitted again: devices stay; layers, recompute and micro-batches are chosen anew.

Every stage takes the fastest option for its layers (`stage_options`).  Layers are divided so that
the slowest stage is as fast as possible, and the batch so that the last replica ends as early as
possible.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

from megatron_hetero.cost.memory.device import StateHolders, kept_sends
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.step_cost import PlacementCost, ReplicaCost
from megatron_hetero.planner.completion.counts import NEGLIGIBLE_TRIP, with_counts
from megatron_hetero.planner.completion.stage_lines import StageOption
from megatron_hetero.planner.completion.stage_options import StageOptions, StagePlace
from megatron_hetero.planner.evaluate.replica_shapes import Likeness, ReplicaShapes
from megatron_hetero.schedule.orders.one_f_one_b import launch_counts


@dataclass(frozen=True)
class Filling:
    """The stages of replicas that are alike, on the devices of one of them, for one micro-batch
    size; and about the seconds of a first micro-batch and of each further one."""

    stages: tuple[PlacedStage, ...]
    launch_counts: tuple[int, ...] | None
    size: int
    times_s: tuple[float, ...]
    fill_s: float
    period_s: float

    def replica(self, own: PlacedReplica, num_micro_batches: int, own_size: int) -> PlacedReplica:
        """Place it on the devices of `own`, with so many micro-batches; `own_size` is the job's."""
        size = None if self.size == own_size else self.size
        replica = PlacedReplica(self.stages, num_micro_batches, micro_batch_size=size)
        replica = on_devices_of(replica, own)
        if self.launch_counts is None:
            return replica
        return with_counts(replica, [min(c, num_micro_batches) for c in self.launch_counts])


KnownOptions = dict[tuple[int, int, StateHolders], StageOptions]
"""By micro-batch size, rows of the vocabulary, and holders of the optimizer's states."""


class Refitter:
    """Fills the replicas of one placement; replicas that are alike are filled once."""

    def __init__(
        self,
        costs: CostModel,
        placement: Placement,
        known: KnownOptions | None = None,
        given: bool = False,
    ) -> None:
        """`known`: what other fillers have found out with the same prices, and learn from here."""
        self.given = given
        self.costs = costs.sharded_as(placement)
        self.placement = placement
        self.vocab_rows = costs.vocab_rows(placement.widths)
        self._ways: KnownOptions = {} if known is None else known
        self._shapes = ReplicaShapes(Likeness(costs.cluster))
        self._fillings: dict[Hashable, Filling | None] = {}
        self._priced: dict[Hashable, ReplicaCost] = {}

    def options(self, size: int) -> StageOptions:
        """Return what stages take at a micro-batch size."""
        key = size, self.vocab_rows, self.costs.holders
        if key not in self._ways:
            costs = self.costs.variant(micro_batch_size=size)
            self._ways[key] = StageOptions(costs, self.vocab_rows, self.given)
        return self._ways[key]

    def key(self, replica: PlacedReplica) -> Hashable:
        """Return equal for replicas of equal price."""
        return self._shapes.of(replica, self.vocab_rows)

    def price(self, replica: PlacedReplica) -> ReplicaCost:
        """Return its price; replicas that are alike are priced once."""
        key = self.key(replica)
        if key not in self._priced:
            self._priced[key] = self.costs.replica(replica, self.vocab_rows)
        return self._priced[key]

    def shape(self, replica: PlacedReplica) -> Hashable:
        """Return equal for replicas that are filled alike."""
        return self._shapes.of_groups(replica, self.vocab_rows)

    def cost(self, placement: Placement) -> PlacementCost:
        """Return the price of a placement of as many replicas and stages as the first one."""
        replicas = tuple(self.price(replica) for replica in placement.replicas)
        return self.costs.combine(placement, replicas, self.vocab_rows)

    def filling(self, replica: PlacedReplica, size: int, most: int) -> Filling | None:
        """Return the replica's stages at a micro-batch size, for at most `most` micro-batches:
        with 1F1B's launch counts, or with those that hide its hops where they fit and are
        faster."""
        key = self.shape(replica), size, most
        if key not in self._fillings:
            self._fillings[key] = self._fill(replica, size, most)
        return self._fillings[key]

    def _fill(self, replica: PlacedReplica, size: int, most: int) -> Filling | None:
        depth = len(replica.stages)
        plain = self._with_counts(replica, size, [min(depth - i, most) for i in range(depth)], None)
        if plain is None or depth == 1 or not self.costs.has_launch_counts:
            return plain
        period_s = max(plain.times_s)
        trips_s = self._round_trips_s(replica, size)
        hops_s = [trip / 2 if trip > NEGLIGIBLE_TRIP * period_s else 0.0 for trip in trips_s]
        wanted = [min(count, most) for count in launch_counts(plain.times_s, hops_s)]
        if not any(hops_s) or all(count <= min(depth - i, most) for i, count in enumerate(wanted)):
            return plain
        ahead = self._with_counts(replica, size, wanted, tuple(wanted))
        faster = ahead is not None and ahead.period_s < plain.period_s
        return ahead if faster else plain

    def _with_counts(
        self,
        replica: PlacedReplica,
        size: int,
        in_flight: Sequence[int],
        counts: tuple[int, ...] | None,
    ) -> Filling | None:
        options = [self.options(size).of(p) for p in places(replica, in_flight, counts is not None)]
        layers = minimax(
            self.costs.workload.model.num_layers,
            [[option.time_s for option in of] for of in options],
        )
        if layers is None:
            return None
        stages = tuple(
            with_option(stage, n, of[n - 1])
            for stage, n, of in zip(replica.stages, layers, options, strict=True)
        )
        times_s = tuple(of[n - 1].time_s for n, of in zip(layers, options, strict=True))
        costs = self.costs.variant(micro_batch_size=size)
        groups = [stage.devices for stage in replica.stages]
        fill_s, period_s = costs.quick_times_s(times_s, groups)
        if counts is not None:
            period_s = costs.least_period_s(times_s, groups)
        return Filling(stages, counts, size, times_s, fill_s, period_s)

    def _round_trips_s(self, replica: PlacedReplica, size: int) -> list[float]:
        costs = self.costs.variant(micro_batch_size=size)
        groups = [stage.devices for stage in replica.stages]
        return [costs.hop(a, b).total_s + costs.hop(b, a).total_s for a, b in pairwise(groups)]


def on_devices_of(replica: PlacedReplica, other: PlacedReplica) -> PlacedReplica:
    """Return the replica with each stage on the devices of the other's in its place."""
    pairs = zip(replica.stages, other.stages, strict=True)
    stages = tuple([replace(stage, devices=own.devices) for stage, own in pairs])
    return replace(replica, stages=stages)


def with_option(stage: PlacedStage, num_layers: int, option: StageOption) -> PlacedStage:
    """Return the stage with so many layers, as `option` has them."""
    return replace(
        stage,
        num_layers=num_layers,
        recompute=option.recompute,
        recompute_num_layers=option.num_recomputed,
        expert_shares=option.expert_shares,
    )


def places(
    replica: PlacedReplica, in_flight: Sequence[int], has_counts: bool
) -> Iterator[StagePlace]:
    """Yield what each stage of a replica has to keep when so many micro-batches are in flight
    there.

    `has_counts`: they are launch counts of its own (as in `CostModel.stage_memories`).
    """
    last = len(replica.stages) - 1
    kept = kept_sends(in_flight) if has_counts else [None] * len(replica.stages)
    for index, stage in enumerate(replica.stages):
        parts = stage.state_parts
        yield StagePlace(
            stage.devices,
            stage.shares,
            index == 0,
            index == last,
            in_flight[index],
            kept[index],
            None if parts is None else StateHolders(*(1 / part for part in parts)),
            stage.context_parallel,
            stage.expert_shares,
            stage.context_shares,
        )


def minimax(num_layers: int, times_s: Sequence[Sequence[float]]) -> tuple[int, ...] | None:
    """Return layers by stage, each at least 1, such that the slowest stage is as fast as possible;
    None if they do not fit.

    Args:
        times_s: seconds with 1, 2, ... layers, rising, as many as fit, shape [stage][layers - 1].
    """
    num_stages = len(times_s)
    if num_stages > num_layers or any(not times for times in times_s):
        return None
    if sum(len(times) for times in times_s) < num_layers:
        return None
    layers = [1] * num_stages
    # Among equals the later stage, which keeps fewer micro-batches, takes the layer.
    heap = [(times[1], -i) for i, times in enumerate(times_s) if len(times) > 1]
    heapify(heap)
    for _ in range(num_layers - num_stages):
        _, key = heappop(heap)
        layers[-key] += 1
        if layers[-key] < len(times_s[-key]):
            heappush(heap, (times_s[-key][layers[-key]], key))
    return tuple(layers)


def share_batch(num_sequences: int, fillings: Sequence[Filling]) -> tuple[int, ...] | None:
    """Return micro-batches of each replica, at least 1, that make up the batch and let the last
    replica end as early as possible; None where the sizes do not add up.

    One at a time goes to the replica that would then end first among those whose size still fits;
    with equal sizes that is optimal (`layers.split_layers`).
    """
    counts = [1] * len(fillings)
    left = num_sequences - sum(filling.size for filling in fillings)
    heap = [(f.fill_s + f.period_s, i) for i, f in enumerate(fillings)]
    heapify(heap)
    while left > 0 and heap:
        end_s, i = heappop(heap)
        if fillings[i].size > left:
            continue
        counts[i] += 1
        left -= fillings[i].size
        heappush(heap, (end_s + fillings[i].period_s, i))
    return tuple(counts) if left == 0 else None
