"""Loads of an exchange over some holders on the paths, for each byte exchanged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import permutations
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from megatron_hetero.cluster.node_links import NodePair
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.group_flow import group_transfers
from megatron_hetero.cost.network.lines import LineTable
from megatron_hetero.cost.network.link_terms import FanIn, adding_s, transfer_s
from megatron_hetero.cost.network.nics import group_seconds
from megatron_hetero.cost.network.ring import held_fraction, hop_prices, pass_latency_s, ring_ends
from megatron_hetero.cost.placement import PlacedStage
from megatron_hetero.exchange.plan import Purpose
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import ModelSpec

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@value(frozen=True, eq=False)
class Flow:
    """Seconds for which a buffer takes each path, and latency.

    Paths are numbers, each at most once: of a pair of nodes, of one direction of a device's port,
    or of a line that paths share.
    """

    paths: Ints
    seconds: Floats
    latency_s: float


@value(frozen=True, eq=False)
class HolderFlow:
    """A `Flow` for each byte, over any holders that stand on the same nodes.

    Ports are those of the holders' places in the ring: `ports` are their positions in `paths`.
    `adding_s_per_byte`: for each of a bucket, until its owner has added what it has received.
    """

    paths: Ints
    s_per_byte: Floats
    latency_s: float
    adding_s_per_byte: float
    ports: Ints
    places: Ints
    directions: Ints

    def of(self, first_ports: Ints, num_bytes: float, bucket_bytes: float) -> Flow:
        """Return the flow of one buffer.

        Args:
            first_ports: path number of each holder's port outward, in the ring's order.
            bucket_bytes: those of a bucket that ranks exchange at a time.
        """
        # Ports are the holders' own, so they are numbered here; all else is as for any holders.
        paths = self.paths.copy()
        paths[self.ports] = first_ports[self.places] + self.directions
        latency_s = self.latency_s + self.adding_s_per_byte * bucket_bytes
        return Flow(paths, self.s_per_byte * num_bytes, latency_s)


class HolderFlows:
    """Maker of flows, for holders in the order of their ring."""

    def __init__(self, cluster: Cluster, model: ModelSpec) -> None:
        self._cluster = cluster
        self._model = model

    @property
    def node_number(self) -> Mapping[str, int]:
        """Return the number of each node; the path from one node to another has the first one's
        number times the number of nodes plus the other's."""
        return self._cluster.link_classes.node_number

    @cached_property
    def first_port(self) -> int:
        """Return the first path number of a port; each device has two."""
        return len(self._cluster.nodes) ** 2

    @cached_property
    def first_line(self) -> int:
        """Return the first path number of a line that paths share (`line_table`)."""
        return self.first_port + 2 * len(self._cluster.devices)

    @cached_property
    def line_table(self) -> LineTable:
        """Return the cluster's lines."""
        return LineTable(self._cluster)

    def numbered(
        self, pairs: Mapping[NodePair, float], lines: Mapping[str, float]
    ) -> dict[int, float]:
        """Convert values of pairs of nodes and of lines to values of path numbers."""
        own, table = self.node_number, self.line_table.numbers
        found = {own[a] * len(own) + own[b]: value for (a, b), value in pairs.items()}
        return found | {self.first_line + table[name]: value for name, value in lines.items()}

    def around(self, stages: Sequence[PlacedStage], num_passes: int) -> HolderFlow:
        """Load the paths of an all-reduce in a ring, or of a single pass."""
        # Shape [hop]; all-reduce is two passes, of which the first adds.
        hops = hop_prices(self._cluster, self._model, stages)
        hop_s = num_passes * hops.s_per_byte
        if num_passes == 2:
            hop_s = hop_s + hops.adding_s_per_byte
        nodes = hops.nodes
        next_nodes = np.roll(nodes, -1)
        # A hop between nodes takes their path; inside, the ports of two neighbouring holders.
        between, inside = np.flatnonzero(nodes != next_nodes), np.flatnonzero(nodes == next_nodes)
        once = num_passes * (len(nodes) - 1) / len(nodes)
        return self._holder_flow(
            (nodes[between], next_nodes[between]),
            np.full(len(between), once),
            hop_s[between],
            np.concatenate([inside, (inside + 1) % len(nodes)]),
            np.repeat([_OUT, _IN], len(inside)),
            np.tile(hop_s[inside], 2),
            num_passes * pass_latency_s(hops.latency_s.tolist()),
            nics=self._nics((*ends, once) for ends in ring_ends(stages)),
        )

    def to_owners(self, stages: Sequence[PlacedStage]) -> HolderFlow:
        """Load the paths of an exchange from every holder to each owner (`optimizer_share`)."""
        num, weights = len(stages), [stage.optimizer_share or 1 for stage in stages]
        total = sum(weights)
        # Holders by node.
        members: dict[str, list[int]] = {}
        for place, stage in enumerate(stages):
            members.setdefault(stage.devices[0].node, []).append(place)
        fan_in = FanIn(self._cluster, [stage.devices[0] for stage in stages])
        # What each node's holders own together, and the one with most of them.
        owned = {node: sum(weights[place] for place in own) for node, own in members.items()}
        most = {node: max(weights[place] for place in own) for node, own in members.items()}
        places: list[int] = []
        out_s, in_s = list[float](), list[float]()
        latency_s = added_s = 0.0
        # Inside a node: each holder's port sends to and hears from all its neighbours.
        for node, own in members.items():
            if len(own) > 1:
                link = self._cluster.node_by_name[node].link
                latency_s = max(latency_s, link.latency_s)
                added_s = max(added_s, adding_s(most[node] / total, num - 1, link))
                largest = max(held_fraction(self._model, stages[place]) for place in own)
                terms = link, fan_in.num_senders(node, node, link)
                places += own
                # To each neighbour what that one owns; from each what the holder itself owns.
                for weight in (weights[place] for place in own):
                    out_s.append(transfer_s((owned[node] - weight) / total * largest, *terms))
                    in_s.append(transfer_s((len(own) - 1) * weight / total * largest, *terms))
        # Between nodes: one path for each ordered pair, with all messages of the pair.
        names = list(members)
        nodes = np.array([self.node_number[name] for name in names])
        counts = np.array([len(own) for own in members.values()])
        senders, receivers = np.nonzero(~np.eye(len(nodes), dtype=bool))
        classes = self._cluster.link_classes
        kinds = classes.of_pairs[nodes[senders], nodes[receivers]]
        parts = counts[senders] * np.array(list(owned.values()))[receivers] / total
        paths_s = parts / classes.bytes_per_s[kinds]
        # Latency, addition and incast depend on the class of link.
        for kind in np.flatnonzero(np.bincount(kinds)).tolist():
            link = classes.links[kind]
            latency_s = max(latency_s, link.latency_s)
            heaviest = max(most[names[i]] for i in set(receivers[kinds == kind].tolist()))
            added_s = max(added_s, adding_s(heaviest / total, num - 1, link))
            if link.incast is not None:
                for i in np.flatnonzero(kinds == kind).tolist():
                    pair = names[senders[i]], names[receivers[i]]
                    paths_s[i] = transfer_s(parts[i], link, fan_in.num_senders(*pair, link))
        return self._holder_flow(
            (nodes[senders], nodes[receivers]),
            parts,
            paths_s,
            np.tile(places, 2),
            np.repeat([_OUT, _IN], len(places)),
            [*out_s, *in_s],
            latency_s,
            added_s,
            self._nics(
                (a.devices, b.devices, (b.optimizer_share or 1) / total)
                for a, b in permutations(stages, 2)
            ),
        )

    def by_groups(
        self,
        stages: Sequence[PlacedStage],
        groups: Sequence[Sequence[str]],
        purpose: Purpose,
        uplinks: Sequence[Sequence[int]] = (),
    ) -> HolderFlow | None:
        """Load the paths of an exchange by groups of machines; None where all are in one.

        Args:
            stages: the holders.
            groups: `Plan.exchange_groups`.
            purpose: all-reduce, reduce-scatter or all-gather.
            uplinks: `Plan.exchange_uplinks`.
        """
        # Each holder is known by its first GPU.
        devices = [stage.devices[0] for stage in stages]
        weights = [stage.optimizer_share or 1 for stage in stages]
        found = group_transfers(self._cluster, devices, groups, purpose, weights, uplinks)
        if found is None:
            return None
        # Between nodes: sum the transfers of each path.
        nodes = np.array([self.node_number[device.node] for device in devices])
        here, there = nodes[found.senders], nodes[found.receivers]
        crosses = here != there
        paths, own = np.unique(here[crosses] * len(self.node_number) + there[crosses],
                               return_inverse=True)  # fmt: skip
        parts, seconds = (
            np.bincount(own, loads[crosses], len(paths))
            for loads in (found.parts, found.s_per_byte)
        )
        # Inside nodes: a port lasts as long as the larger of its two ends' parts.
        held = np.array([held_fraction(self._model, stage) for stage in stages])
        ends = found.senders[~crosses], found.receivers[~crosses]
        ports_s = np.maximum(held[ends[0]], held[ends[1]]) * found.s_per_byte[~crosses]
        directions = [np.bincount(end, ports_s, len(stages)) for end in ends]
        places = [np.flatnonzero(loads) for loads in directions]
        return self._holder_flow(
            (paths // len(self.node_number), paths % len(self.node_number)),
            parts,
            seconds,
            np.concatenate(places),
            np.repeat([_OUT, _IN], [len(place) for place in places]),
            np.concatenate([loads[at] for loads, at in zip(directions, places, strict=True)]),
            found.latency_s,
            found.adding_s_per_byte,
            self._nics(
                (stages[t.sender].devices, stages[t.receiver].devices, t.part)
                for t in found.transfers
            ),
        )

    def _nics(
        self, carried: Iterable[tuple[Sequence[Device], Sequence[Device], float]]
    ) -> Mapping[int, float]:
        """Load the NICs of machines with several, by the number of the line: from and to whom, and
        what of each byte."""
        found: dict[int, float] = {}
        if not self._cluster.has_nics:
            return found
        # A NIC is a line of its own, and has the line's number.
        for senders, receivers, part in carried:
            for name, seconds in group_seconds(self._cluster, senders, receivers, part).items():
                line = self.line_table.numbers[name]
                found[line] = found.get(line, 0.0) + seconds
        return found

    def _holder_flow(
        self,
        nodes: tuple[Ints, Ints],
        parts: Floats,
        paths_s: Floats,
        places: Ints | Sequence[int],
        directions: Ints,
        ports_s: Floats | Sequence[float],
        latency_s: float,
        added_s: float = 0.0,
        nics: Mapping[int, float] = MappingProxyType({}),
    ) -> HolderFlow:
        """Combine the loads of paths between `nodes` for `parts` of each byte, of one direction of
        the ports of the holders at `places`, and of NICs."""
        # A path's number is sender times nodes plus receiver.
        senders, receivers = nodes
        paths = senders * len(self.node_number) + receivers
        # Lines that paths share, and NICs, are further paths with numbers of their own.
        if self._cluster.has_lines:
            lines, lines_s = self.line_table.loads(senders, receivers, parts)
            paths = np.concatenate([paths, self.first_line + lines])
            paths_s = np.concatenate([paths_s, lines_s])
        if nics:
            numbers = np.array(list(nics), np.int64)
            paths = np.concatenate([paths, self.first_line + numbers])
            paths_s = np.concatenate([paths_s, np.array(list(nics.values()))])
        # Ports have no number yet (-1): `HolderFlow.of` fills them in.
        return HolderFlow(
            np.concatenate([paths, np.full(len(places), -1)]),
            np.concatenate([paths_s, np.asarray(ports_s, np.float64)]),
            latency_s,
            added_s,
            len(paths) + np.arange(len(places)),
            np.asarray(places, np.int64),
            directions,
        )


_OUT, _IN = 0, 1
"""Directions through the port of a device."""
