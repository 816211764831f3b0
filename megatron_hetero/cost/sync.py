"""Seconds of the gradient exchange between replicas, and between the stages of a tied embedding.

The planner's quick form of what `schedule.gradient_exchange` makes and the runtime does.  Every run
of layers with the same holders is one exchange: an all-reduce in a ring, or, with the distributed
optimizer, every part straight to its owner, and after the update the new weights in rings.  It
begins when its last holder's backward passes are done (with `--overlap-grad-reduce` a first stage
begins within its last one), and takes each of its paths in turn with all others that cross it; a
port of a stage inside its node is a path too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import ceil

import numpy as np

from megatron_hetero.cluster.spec import Cluster, Link
from megatron_hetero.cost.buckets import StageId, num_rank_sets
from megatron_hetero.cost.exchange_clock import Floats, Flow, HolderFlow, Ints, Step, last_end_s
from megatron_hetero.cost.link_terms import FanIn, adding_s, transfer_s
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.ring import held_fraction, pass_latency_s, ring
from megatron_hetero.cost.sync_groups import (
    SyncGroup,
    buffers_of,
    mean_bucket_params,
    sync_groups,
    witness_of,
)
from megatron_hetero.model.spec import ModelSpec


@dataclass(frozen=True)
class _Prices:
    """An exchange over some holders: of gradients and of new weights."""

    gradients: HolderFlow
    weights: HolderFlow | None
    num_rank_sets: int


@dataclass(frozen=True)
class GroupTime:
    """One set of holders: its parameters, buckets, and what it loads on its paths."""

    group: SyncGroup
    waiting: tuple[StageId, ...]
    """Of its holders one of each kind: those of a kind come to it together (`witness_of`)."""
    bucket_share: float
    """Of its parameters, in each bucket but the last."""
    buffers: Mapping[StageId, int]
    """Those that a bucket takes of a rank of each that is waiting; empty where it needs none."""
    gradients: Flow
    weights: Flow | None


@dataclass(frozen=True)
class StageEnd:
    """When a stage's last backward pass ends, and of that pass the seconds within which gradients
    are exchanged as they become complete (0: all after it)."""

    end_s: float
    backward_s: float = 0.0


class GradientExchange:
    """Prices of one job's exchanges on one cluster, cached by the holders' nodes and widths.

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
        self._prices: dict[bytes, _Prices] = {}
        self._likes: dict[tuple[object, ...], int] = {}

    @cached_property
    def _node_number(self) -> Mapping[str, int]:
        return {node.name: number for number, node in enumerate(self._cluster.nodes)}

    @cached_property
    def _first_port(self) -> Mapping[str, int]:
        """The path number of the way out of the port of each node's first device; the way in
        follows, then those of its other devices.  They rise in the order of rings; numbers below
        are of pairs of nodes."""
        place = self._cluster.site_places
        nodes = sorted(self._cluster.nodes, key=lambda node: (place[node.site], node.name))
        counts = accumulate((2 * node.num_gpus for node in nodes), initial=len(nodes) ** 2)
        return {node.name: first for node, first in zip(nodes, counts, strict=False)}

    def groups(self, placement: Placement, vocab_rows: int) -> tuple[GroupTime, ...]:
        """Every exchange of a step, in the order in which all stages run them."""
        return tuple(timed for timed, _ in self._timed(placement, vocab_rows))

    def _timed(
        self, placement: Placement, vocab_rows: int
    ) -> Iterator[tuple[GroupTime, tuple[int, ...]]]:
        """`groups`, each with its holders' places in the layout's order of stages."""
        starts = [0, *accumulate(len(replica.stages) for replica in placement.replicas)]
        of_stage = [s.groups for replica in placement.replicas for s in replica.stages]
        stages = [group for groups in of_stage for group in groups]
        firsts = [0, *accumulate(map(len, of_stage))]
        ports = np.array([self._port(stage) for stage in stages])
        likes = np.array([self._like(stage) for stage in stages])
        witnesses = witness_of(placement)
        found: dict[tuple[int, ...], tuple[_Prices, Ints]] = {}
        for group in sync_groups(placement, self._model, vocab_rows):
            places = tuple([starts[r] + s for r, s in group.holders])
            if places not in found:
                members = np.array([m for p in places for m in range(firsts[p], firsts[p + 1])])
                members = members[np.argsort(ports[members])]
                found[places] = self._priced(likes, stages, members), ports[members]
            prices, first_ports = found[places]
            sets = prices.num_rank_sets
            waiting = tuple([(r, s) for r, s in group.holders if witnesses[r] == r])
            buffers: Mapping[StageId, int] = {}
            if self._weight_bytes is not None:
                buffers = buffers_of(placement, waiting, sets)
            share = 1.0
            if group.num_layers:
                share = min(1.0, mean_bucket_params(self._model, sets) / group.num_params)
            num_bytes = group.num_params * self._gradient_bytes
            gradients = prices.gradients.of(first_ports, num_bytes, share * num_bytes / sets)
            weights = None
            if prices.weights is not None and self._weight_bytes is not None:
                num_bytes = group.num_params * self._weight_bytes
                weights = prices.weights.of(first_ports, num_bytes, share * num_bytes / sets)
            yield GroupTime(group, waiting, share, buffers, gradients, weights), places

    def exposed_s(
        self,
        placement: Placement,
        vocab_rows: int,
        ends: Sequence[StageEnd],
        pipelines_s: float,
    ) -> float:
        """Seconds from the end of all pipelines to the last reduced gradient, and those of the new
        weights after the update.

        Args:
            ends: of every stage, in the layout's order.
        """
        firsts = [first for replica in placement.replicas for first in replica.first_layers]
        placed = [stage for replica in placement.replicas for stage in replica.stages]
        layer_s = [e.backward_s / s.num_layers for e, s in zip(ends, placed, strict=True)]
        overlaps = any(layer_s)

        def ready_s(places: Sequence[int], layer: int) -> float:
            """When all holders have the gradients down to `layer`."""
            if not overlaps:
                return max([ends[p].end_s for p in places])
            return max([ends[p].end_s - layer_s[p] * (layer - firsts[p]) for p in places])

        steps, gathers = [], []
        for timed, places in self._timed(placement, vocab_rows):
            group, common = timed.group, (timed.bucket_share, timed.buffers)
            end = group.first_layer + group.num_layers
            first = max(group.first_layer, end - ceil(timed.bucket_share * group.num_layers))
            last_s = ready_s(places, group.first_layer)
            first_s = ready_s(places, first) if overlaps else last_s
            steps.append(Step(timed.waiting, timed.gradients, first_s, last_s, *common))
            if timed.weights is not None:
                gathers.append(Step(timed.waiting, timed.weights, 0.0, 0.0, *common))
        return max(0.0, last_end_s(steps) - pipelines_s) + last_end_s(gathers)

    def alone_s(self, placement: Placement, vocab_rows: int) -> float:
        """Seconds of the exchange by itself, all stages ready at once."""
        ends = [StageEnd(0.0) for replica in placement.replicas for _ in replica.stages]
        return self.exposed_s(placement, vocab_rows, ends, 0.0)

    def path_seconds(self, placement: Placement, vocab_rows: int) -> dict[tuple[str, str], float]:
        """Seconds for which the exchanges of a step take each path between two nodes."""
        found: dict[tuple[str, str], float] = {}
        names = list(self._node_number)
        for timed in self.groups(placement, vocab_rows):
            for flow in (timed.gradients, timed.weights):
                if flow is None:
                    continue
                for path, seconds in zip(flow.paths.tolist(), flow.seconds.tolist(), strict=True):
                    if path < len(names) ** 2:
                        here, there = divmod(path, len(names))
                        nodes = names[here], names[there]
                        found[nodes] = found.get(nodes, 0.0) + seconds
        return found

    def _port(self, stage: PlacedStage) -> int:
        first = stage.devices[0]
        return self._first_port[first.node] + 2 * first.index

    def _like(self, stage: PlacedStage) -> int:
        """Equal for groups of equal price."""
        key = stage.devices[0].node, len(stage.devices), stage.shares
        return self._likes.setdefault(key, len(self._likes))

    def _priced(self, likes: Ints, stages: Sequence[PlacedStage], members: Ints) -> _Prices:
        """Of holders in the order of their ring.

        Args:
            likes: `_like` of each of the stages.
            members: positions of the holders among them.
        """
        key = likes[members].tobytes()
        if key not in self._prices:
            self._prices[key] = self._price([stages[member] for member in members.tolist()])
        return self._prices[key]

    def _price(self, stages: Sequence[PlacedStage]) -> _Prices:
        num_sets = num_rank_sets(list(stages))
        if self._weight_bytes is None:
            return _Prices(self._around(stages, 2), None, num_sets)
        return _Prices(self._to_owners(stages), self._around(stages, 1), num_sets)

    def _around(self, stages: Sequence[PlacedStage], num_passes: int) -> HolderFlow:
        """An all-reduce in a ring, or one pass that hands on."""
        hops = ring(self._cluster, self._model, stages)
        hop_s = np.array([hop.passes_s_per_byte(num_passes, num_passes == 2) for hop in hops])
        nodes = np.array([self._node_number[hop.nodes[0]] for hop in hops])
        next_nodes = np.roll(nodes, -1)
        between, inside = np.flatnonzero(nodes != next_nodes), np.flatnonzero(nodes == next_nodes)
        return _holder_flow(
            nodes[between] * len(self._node_number) + next_nodes[between],
            hop_s[between],
            np.concatenate([inside, (inside + 1) % len(hops)]),
            np.repeat([_OUT, _IN], len(inside)),
            np.tile(hop_s[inside], 2),
            num_passes * pass_latency_s(hops),
        )

    def _to_owners(self, stages: Sequence[PlacedStage]) -> HolderFlow:
        """Every holder sends every other one its n-th."""
        num = len(stages)
        members: dict[str, list[int]] = {}
        for place, stage in enumerate(stages):
            members.setdefault(stage.devices[0].node, []).append(place)
        fan_in = FanIn(self._cluster, [stage.devices[0] for stage in stages])
        places: list[int] = []
        ports_s: list[float] = []
        latency_s = added_s = 0.0
        for node, own in members.items():
            if len(own) > 1:
                link = self._cluster.node_by_name[node].link
                latency_s = max(latency_s, link.latency_s)
                added_s = max(added_s, adding_s(1 / num, num - 1, link))
                largest = max(held_fraction(self._model, stages[place]) for place in own)
                part = (len(own) - 1) / num * largest
                port_s = transfer_s(part, link, fan_in.num_senders(node, node, link))
                places += own
                ports_s += [port_s] * len(own)
        names = list(members)
        nodes = np.array([self._node_number[name] for name in names])
        counts = np.array([len(own) for own in members.values()])
        senders, receivers = np.nonzero(~np.eye(len(nodes), dtype=bool))
        classes = self._link_classes
        kinds = classes.of_pairs[nodes[senders], nodes[receivers]]
        parts = counts[senders] * counts[receivers] / num
        paths_s = parts / classes.bytes_per_s[kinds]
        for kind in np.flatnonzero(np.bincount(kinds)).tolist():
            link = classes.links[kind]
            latency_s = max(latency_s, link.latency_s)
            added_s = max(added_s, adding_s(1 / num, num - 1, link))
            if link.incast is not None:
                for i in np.flatnonzero(kinds == kind).tolist():
                    pair = names[senders[i]], names[receivers[i]]
                    paths_s[i] = transfer_s(parts[i], link, fan_in.num_senders(*pair, link))
        return _holder_flow(
            nodes[senders] * len(self._node_number) + nodes[receivers],
            paths_s,
            np.tile(places, 2),
            np.repeat([_OUT, _IN], len(places)),
            np.tile(ports_s, 2),
            latency_s,
            added_s,
        )

    @cached_property
    def _link_classes(self) -> _LinkClasses:
        """Few in the largest cluster, however many pairs of nodes it has."""
        summary, sites = self._cluster.link_summary, self._cluster.site_places
        links = tuple(dict.fromkeys([*summary.usual.values(), *summary.others.values()]))
        number = {link: i for i, link in enumerate(links)}
        of_sites = np.zeros((len(sites), len(sites)), np.int64)
        for (here, there), link in summary.usual.items():
            of_sites[sites[here], sites[there]] = number[link]
        own = np.array([sites[node.site] for node in self._cluster.nodes])
        of_pairs = of_sites[np.ix_(own, own)]
        for (one, other), link in summary.others.items():
            of_pairs[self._node_number[one], self._node_number[other]] = number[link]
        return _LinkClasses(links, np.array([link.bytes_per_s for link in links]), of_pairs)


@dataclass(frozen=True, eq=False)
class _LinkClasses:
    """The unlike links between nodes: all of them, their bandwidths, and which one each pair has,
    [node, node] (what it says of a node and itself means nothing)."""

    links: tuple[Link, ...]
    bytes_per_s: Floats
    of_pairs: Ints


def _holder_flow(
    paths: Ints,
    paths_s: Floats,
    places: Ints,
    ways: Ints,
    ports_s: Floats,
    latency_s: float,
    added_s: float = 0.0,
) -> HolderFlow:
    """What paths between nodes carry, and one way each of the ports of holders at `places`."""
    return HolderFlow(
        np.concatenate([paths, np.full(len(places), -1)]),
        np.concatenate([paths_s, ports_s]),
        latency_s,
        added_s,
        len(paths) + np.arange(len(places)),
        places.astype(np.int64),
        ways,
    )


_OUT, _IN = 0, 1
"""Ways through the port of a device."""
