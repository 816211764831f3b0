"""Runs of layers with the same holders, and the prices of their exchanges; cached."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.holder_flow import Flow, HolderFlow, HolderFlows, Ints
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.sync.buckets import StageId, num_rank_sets
from megatron_hetero.cost.sync.groups import SyncGroup, mean_bucket_params, sync_groups, witness_of
from megatron_hetero.errors import UsageError
from megatron_hetero.exchange.plan import Purpose
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import ModelSpec

_Groups = tuple[tuple[tuple[str, ...], ...], tuple[tuple[int, ...], ...]]
"""`Placement.exchange_groups` and `exchange_uplinks`."""
_NO_GROUPS: _Groups = (), ()
_MOST_KEPT, _MOST_PATHS = 4, 50_000
"""Placements whose exchanges are kept, and paths of one."""
_MOST_PRICED = 200_000
"""Holders of all exchanges whose prices are kept."""


@value(frozen=True)
class ExchangePrices:
    """An exchange over some holders: of gradients and of new weights."""

    gradients: HolderFlow
    weights: HolderFlow | None
    num_rank_sets: int
    is_by_groups: bool = False
    """True if the exchange runs in rounds; the runtime has as many rounds under way as buffers."""


@value(frozen=True)
class ExchangeRun:
    """One set of holders: its parameters, buckets, and what it loads on its paths."""

    group: SyncGroup
    waiting: tuple[StageId, ...]
    """One holder of each kind: those of a kind come to the exchange together (`witness_of`)."""
    bucket_share: float
    """Part of its parameters in each bucket but the last."""
    rank_bytes: float
    """Bytes of a bucket of one rank set."""
    prices: ExchangePrices
    gradients: Flow
    weights: Flow | None
    places: Ints
    """The holders' places in the layout's order of stages."""


class ExchangeRuns:
    """Prices of a job's runs on a cluster, cached by the holders' nodes and widths.

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

    def _port(self, stage: PlacedStage) -> int:
        first = stage.devices[0]
        return self._port_of[first]

    def _like(self, stage: PlacedStage) -> int:
        """Return a number that groups of equal price share."""
        nics = self._cluster.has_nics and tuple(map(self._cluster.nic_of, stage.devices))
        key = stage.devices[0].node, stage.cut, stage.optimizer_share or 1, nics
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
