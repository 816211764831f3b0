"""Seconds of the gradient exchange between replicas, and between the stages of a tied embedding.

The planner's quick form of what `schedule.exchange.gradients` makes and the runtime does.  Every
run of layers with the same holders is one exchange: an all-reduce in a ring, or, with the
distributed optimizer, every part straight to its owner, and after the update the new weights in
rings; or, where the plan names groups of machines, group by group (`exchange.groups.by_group`).
It begins when its last holder's backward passes are done (with `--overlap-grad-reduce` a first
stage begins within its last one), and takes each of its paths in turn with all others that cross
it; a port of a stage inside its node is a path too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from math import ceil
from types import MappingProxyType

import numpy as np

from megatron_hetero.cluster.node_links import NodePair
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.holder_flow import Flow, HolderFlows, Ints
from megatron_hetero.cost.parameters import layer_params
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import StageId, num_rank_sets
from megatron_hetero.cost.sync.exchange_clock import ExchangeStep, last_end_s, num_buckets
from megatron_hetero.cost.sync.groups import (
    buffers_of,
    mean_bucket_params,
    sync_groups,
    witness_of,
)
from megatron_hetero.cost.sync.room import EarlyRoom, least_rooms
from megatron_hetero.cost.sync.runs import ExchangePrices, ExchangeRun
from megatron_hetero.errors import UsageError
from megatron_hetero.exchange.plan import Purpose
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import ModelSpec

_Groups = tuple[tuple[tuple[str, ...], ...], tuple[tuple[int, ...], ...]]
"""`Placement.exchange_groups` and `exchange_uplinks`."""
_NO_GROUPS: _Groups = (), ()


@value(frozen=True)
class StageEnd:
    """The end of a stage's last backward pass, and the seconds of the pass during which complete
    gradients are exchanged (0: all after the pass)."""

    end_s: float
    backward_s: float = 0.0


@value(frozen=True)
class Carried:
    """Seconds for which an exchange takes paths between nodes, and the shared lines."""

    pairs: Mapping[NodePair, float]
    lines: Mapping[str, float]

    @property
    def busiest_s(self) -> float:
        """Return the seconds of the busiest path or line."""
        return max((*self.pairs.values(), *self.lines.values()), default=0.0)


NOTHING = Carried({}, {})
NO_LIMIT: Mapping[StageId, int] = MappingProxyType({})
"""No limit on the buckets under way."""
_MOST_KEPT, _MOST_PATHS = 4, 50_000
"""Placements whose exchanges are kept, and paths of one."""
_MOST_PRICED = 200_000
"""Holders of all exchanges whose prices are kept."""


class GradientExchangePrices:
    """Prices of a job's exchanges on a cluster, cached by the holders' nodes and widths.

    Args:
        gradient_bytes: of one element on its way.
        weight_bytes: of one element of the new weights, which the distributed optimizer gathers;
            None is an all-reduce.
    """

    def __init__(
        self, cluster: Cluster, model: ModelSpec, gradient_bytes: int, weight_bytes: int | None
    ) -> None:
        self._cluster = cluster
        self._model = model
        self._gradient_bytes = gradient_bytes
        self._weight_bytes = weight_bytes
        self._flows = HolderFlows(cluster, model)
        self._prices: dict[tuple[bytes, _Groups], ExchangePrices] = {}
        self._num_priced = 0
        """Holders of all of these."""
        self._likes: dict[tuple[object, ...], int] = {}
        self._runs: dict[tuple[object, ...], tuple[list[int], list[ExchangeRun]]] = {}
        """Of the last placements, which a search asks for again with other launch counts."""

    @cached_property
    def _port_of(self) -> Mapping[Device, int]:
        """Return the path number of the outward direction of each device's port; the inward one
        follows. They rise in the order of rings."""
        place = self._cluster.site_places
        # Two path numbers a GPU, out and in, node by node in the order of the ring.
        nodes = sorted(self._cluster.nodes, key=lambda node: (place[node.site], node.name))
        counts = accumulate((2 * n.num_gpus for n in nodes), initial=self._flows.first_port)
        return {
            device: first + 2 * place
            for node, first in zip(nodes, counts, strict=False)
            for place, device in enumerate(node.devices)
        }

    def groups(self, placement: Placement, vocab_rows: int) -> Sequence[ExchangeRun]:
        """Return every exchange of a step, in the order of the stages."""
        return self._runs_of(placement, vocab_rows)[1]

    def _timed(
        self, placement: Placement, vocab_rows: int, rooms: Mapping[StageId, int] = NO_LIMIT
    ) -> Iterator[tuple[ExchangeRun, dict[StageId, float]]]:
        """Yield `groups`, each with the parts of rooms that a bucket takes, by waiting stage; empty
        where it needs none."""
        witnesses, runs = self._runs_of(placement, vocab_rows)
        least = least_rooms(rooms, witnesses)
        is_divided = self._weight_bytes is not None
        for run in runs:
            yield run, buffers_of(
                placement,
                {holder: least[holder] for holder in run.waiting if holder in least},
                run.prices.num_rank_sets,
                run.rank_bytes,
                is_packed=is_divided,
                is_received=is_divided or run.prices.is_by_groups,
            )

    def _runs_of(
        self, placement: Placement, vocab_rows: int
    ) -> tuple[list[int], list[ExchangeRun]]:
        """Return `witness_of` and all runs of layers with the same holders; those of the last
        placements are kept."""
        by_groups = placement.exchange_groups, placement.exchange_uplinks
        key = tuple([replica.stages for replica in placement.replicas]), vocab_rows, by_groups
        known = self._runs.get(key)
        if known is None:
            witnesses = witness_of(placement)
            runs = list(self._made_runs(placement, vocab_rows, witnesses, by_groups))
            known = witnesses, runs
            # The flows of large clusters are not worth their memory.
            flows = [flow for run in runs for flow in (run.gradients, run.weights) if flow]
            if sum([len(flow.paths) for flow in flows]) <= _MOST_PATHS:
                while len(self._runs) >= _MOST_KEPT:
                    del self._runs[next(iter(self._runs))]
                self._runs[key] = known
        return known

    def _made_runs(
        self,
        placement: Placement,
        vocab_rows: int,
        witnesses: Sequence[int],
        by_groups: _Groups,
    ) -> Iterator[ExchangeRun]:
        """Yield the runs of layers with the same holders.

        Args:
            witnesses: as of `witness_of`.
            by_groups: as of `_priced`.
        """
        # All stages in a row, and the tensor-parallel groups in them.
        starts = [0, *accumulate(len(replica.stages) for replica in placement.replicas)]
        of_stage = [s.groups for replica in placement.replicas for s in replica.stages]
        stages = [group for groups in of_stage for group in groups]
        firsts = [0, *accumulate(map(len, of_stage))]
        ports = np.array([self._port(stage) for stage in stages])
        likes = np.array([self._like(stage) for stage in stages])
        # Replicas alike wait alike: the first of each kind waits for all.
        own = {r for r, witness in enumerate(witnesses) if r == witness}
        found: dict[tuple[int, ...], tuple[ExchangePrices, Ints, Ints]] = {}
        # Runs of layers with the same holders are priced once.
        for group in sync_groups(placement, self._model, vocab_rows):
            places = tuple([starts[r] + s for r, s in group.holders])
            if places not in found:
                members = own_places = np.array(places)
                # With context parallelism a stage stands for all its tensor-parallel groups.
                if len(stages) > len(of_stage):
                    members = np.array([m for p in places for m in range(firsts[p], firsts[p + 1])])
                # In the order of the ring, so that equal sets of holders share a price.
                members = members[np.argsort(ports[members])]
                prices = self._priced(likes, stages, members, by_groups)
                found[places] = prices, ports[members], own_places
            prices, first_ports, own_places = found[places]
            # A bucket's part of the run, and its bytes.
            sets = prices.num_rank_sets
            waiting = tuple([holder for holder in group.holders if holder[0] in own])
            # Without layers (embedding, head) the run is one bucket.
            share = 1.0
            if group.num_layers:
                share = min(1.0, mean_bucket_params(self._model, sets) / group.num_params)
            num_bytes = group.num_params * self._gradient_bytes
            rank_bytes = share * num_bytes / sets
            # Gradients, then new weights.
            gradients = prices.gradients.of(first_ports, num_bytes, rank_bytes)
            weights = None
            if prices.weights is not None and self._weight_bytes is not None:
                num_bytes = group.num_params * self._weight_bytes
                weights = prices.weights.of(first_ports, num_bytes, share * num_bytes / sets)
            flows = gradients, weights
            yield ExchangeRun(group, waiting, share, rank_bytes, prices, *flows, own_places)

    def exposed_s(
        self,
        placement: Placement,
        vocab_rows: int,
        ends: Sequence[StageEnd],
        pipelines_s: float,
        carried: Carried = NOTHING,
        rooms: Mapping[StageId, int] = NO_LIMIT,
    ) -> float:
        """Return the seconds from the end of all pipelines to the last reduced gradient, plus those
        of the new weights after the update.

        Args:
            ends: of every stage, in the layout's order.
            carried: what boundaries take of the paths meanwhile.
            rooms: bytes for buckets under way (`cost.sync.room`), by stage; without, for all.
        """
        # When each stage is done with each of its layers.
        firsts = np.array([n for replica in placement.replicas for n in replica.first_layers])
        placed = [stage for replica in placement.replicas for stage in replica.stages]
        layer_s = np.array([e.backward_s / s.num_layers for e, s in zip(ends, placed, strict=True)])
        end_s = np.array([end.end_s for end in ends])
        overlaps = bool(layer_s.any())

        def ready_s(places: Ints, layer: int) -> float:
            """Return when all holders have the gradients down to `layer`."""
            ready = end_s[places] - layer_s[places] * (layer - firsts[places])
            return float(ready.max())

        # First and last bucket of each run are ready when all holders have their layers, or, where
        # there is no room within the passes, after these.
        steps, gathers = [], []
        room = EarlyRoom()
        for timed, buffers in self._timed(placement, vocab_rows, rooms):
            group, places = timed.group, timed.places
            common = timed.bucket_share, buffers
            # Layers of the run, of which backward finishes the deepest first.
            end = group.first_layer + group.num_layers
            first = max(group.first_layer, end - ceil(timed.bucket_share * group.num_layers))
            # After the passes unless the buckets find room within them.
            last_s = first_s = float(end_s[places].max())
            if overlaps:
                number = num_buckets(timed.bucket_share)
                num_early = room.take(buffers, number)
                first_s = ready_s(places, first) if num_early else first_s
                last_s = ready_s(places, group.first_layer) if num_early == number else last_s
            steps.append(ExchangeStep(timed.waiting, timed.gradients, first_s, last_s, *common))
            if timed.weights is not None:
                gathers.append(ExchangeStep(timed.waiting, timed.weights, 0.0, 0.0, *common))
        # Exchanges queue on the paths that boundaries have loaded.
        # New weights are gathered after the update, when no boundary is on the paths.
        taken = self._flows.numbered(carried.pairs, carried.lines)
        return max(0.0, last_end_s(steps, taken) - pipelines_s) + last_end_s(gathers)

    def layer_flows(self, stages: Sequence[PlacedStage], num_params: int) -> tuple[Flow, Flow]:
        """Return the flows of a sharded layer: gradients to their owners, weights gathered.

        Args:
            stages: those that hold the layer, one of each replica.
            num_params: of the whole layer.
        """
        # Every group holds the whole layer; an exchange among replicas in the order of the ring.
        groups = [group for stage in stages for group in stage.groups]
        ports = np.array([self._port(group) for group in groups])
        members = np.argsort(ports)
        likes = np.array([self._like(group) for group in groups])
        prices = self._priced(likes, groups, members, _NO_GROUPS)
        if prices.weights is None or self._weight_bytes is None:
            raise UsageError("sharded layers are priced with --use-distributed-optimizer alone")
        gradient_bytes = num_params * self._gradient_bytes
        weight_bytes = num_params * self._weight_bytes
        sets = prices.num_rank_sets
        return (
            prices.gradients.of(ports[members], gradient_bytes, gradient_bytes / sets),
            prices.weights.of(ports[members], weight_bytes, weight_bytes / sets),
        )

    def alone_s(
        self, placement: Placement, vocab_rows: int, rooms: Mapping[StageId, int] = NO_LIMIT
    ) -> float:
        """Return the seconds of the exchange by itself, all stages ready at once, in `rooms`."""
        ends = [StageEnd(0.0) for replica in placement.replicas for _ in replica.stages]
        return self.exposed_s(placement, vocab_rows, ends, 0.0, rooms=rooms)

    def path_seconds(self, placement: Placement, vocab_rows: int) -> dict[tuple[str, str], float]:
        """Return the seconds for which the exchanges of a step occupy each path between two
        nodes."""
        found: dict[tuple[str, str], float] = {}
        # Numbers of paths below the square of the nodes are pairs of nodes (`HolderFlows`).
        names = list(self._flows.node_number)
        flows = [
            (flow, 1)
            for timed in self.groups(placement, vocab_rows)
            for flow in (timed.gradients, timed.weights)
            if flow is not None
        ]
        for flow, times in (*flows, *self._sharded(placement)):
            for path, seconds in zip(flow.paths.tolist(), flow.seconds.tolist(), strict=True):
                if path < len(names) ** 2:
                    here, there = divmod(path, len(names))
                    nodes = names[here], names[there]
                    found[nodes] = found.get(nodes, 0.0) + times * seconds
        return found

    def _sharded(self, placement: Placement) -> Iterator[tuple[Flow, int]]:
        """Yield the flows of sharded layers, and how often a step has each."""
        size = layer_params(self._model, even_share(self._model, 1))
        first = placement.replicas[0]
        for s, stage in enumerate(first.stages):
            if stage.sharding is None:
                continue
            gradients, weights = self.layer_flows([r.stages[s] for r in placement.replicas], size)
            # Each round reduces gradients once, and gathers weights for either pass.
            yield gradients, stage.num_sharded_layers * first.num_rounds
            yield weights, 2 * stage.num_sharded_layers * first.num_rounds

    def _port(self, stage: PlacedStage) -> int:
        first = stage.devices[0]
        return self._port_of[first]

    def _like(self, stage: PlacedStage) -> int:
        """Return a number that groups of equal price share."""
        nics = self._cluster.has_nics and tuple(map(self._cluster.nic_of, stage.devices))
        key = stage.devices[0].node, stage.cut, nics
        return self._likes.setdefault(key, len(self._likes))

    def _priced(
        self,
        likes: Ints,
        stages: Sequence[PlacedStage],
        members: Ints,
        by_groups: _Groups,
    ) -> ExchangePrices:
        """Price an exchange among holders in the order of their ring.

        Args:
            likes: `_like` of each of the stages.
            members: positions of the holders among them.
            by_groups: of machines, inside which holders reduce first, and their uplinks.
        """
        key = likes[members].tobytes(), by_groups
        found = self._prices.get(key)
        if found is None:
            found = self._price([stages[member] for member in members.tolist()], by_groups)
            # Thousands of holders have many sets of them, which seldom come again.
            self._num_priced += len(members)
            while self._prices and self._num_priced > _MOST_PRICED:
                oldest = next(iter(self._prices))
                self._num_priced -= len(oldest[0]) // likes.itemsize
                del self._prices[oldest]
            self._prices[key] = found
        return found

    def _price(self, stages: Sequence[PlacedStage], by_groups: _Groups) -> ExchangePrices:
        # By groups of machines where the plan has them and the holders are in several.
        num_sets = num_rank_sets(list(stages))
        flows, is_divided = self._flows, self._weight_bytes is not None
        groups, uplinks = by_groups
        if groups:
            purpose: Purpose = "reduce_scatter" if is_divided else "all_reduce"
            gradients = flows.by_groups(stages, groups, purpose, uplinks)
            if gradients is not None:
                weights = None
                if is_divided:
                    weights = flows.by_groups(stages, groups, "all_gather", uplinks)
                return ExchangePrices(gradients, weights, num_sets, is_by_groups=True)
        # Otherwise: a ring of two passes, or straight to owners and a ring of one pass.
        if not is_divided:
            return ExchangePrices(flows.around(stages, 2), None, num_sets)
        return ExchangePrices(flows.to_owners(stages), flows.around(stages, 1), num_sets)
