"""The tree of links of some GPUs of a cluster: GPU, node, machine, site, region.

A cluster gives a link for each two nodes, which is a mesh; here every part gets one uplink: its
bandwidth is the most that the part sends to any one other, its latency half of that to the
farthest, so that no two parts are nearer than the cluster says.  Sites are joined to regions where
the links between them differ by more than a half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import inf

from megatron_hetero.cluster.lines import Line
from megatron_hetero.cluster.node_links import Incast, Link
from megatron_hetero.cluster.nodes import Device, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError
from tools.referees.gentree.tree import Branch, DeviceTerms, LinkTree

_PIECE_BYTES = 1 << 20
"""Message size by which links are near or far."""
_ALIKE = 1.5
"""Ratio of times below which two links are of the same kind."""


@dataclass(frozen=True)
class ClusterTree:
    """The tree of some holders of a cluster.

    Attributes:
        tree: its leaves have the names of the holders' first devices.
        places: [holder, as given] -> its number in the tree.
        remarks: where the tree is less than the cluster's links are, in words.
    """

    tree: LinkTree
    places: tuple[int, ...]
    remarks: tuple[str, ...]


def cluster_tree(cluster: Cluster, holders: Sequence[Sequence[Device]]) -> ClusterTree:
    """Build the tree of some holders.

    Args:
        cluster: its nodes and links.
        holders: the devices of each, of one node, which send and receive side by side.

    Raises:
        ClusterError: no holder, a holder without devices or on several nodes, a node that the
            cluster does not have, or two nodes without a link.
    """
    return _TreeBuilder(cluster, holders).build()


class _TreeBuilder:
    """Maker of one tree."""

    def __init__(self, cluster: Cluster, holders: Sequence[Sequence[Device]]) -> None:
        self._cluster = cluster
        self._holders = [tuple(holder) for holder in holders]
        self._remarks: list[str] = []
        self._unlike: list[str] = []
        self._nodes = self._used_nodes()
        self._site_nodes: dict[str, list[Node]] = {}
        for node in self._nodes:
            self._site_nodes.setdefault(node.site, []).append(node)

    def build(self) -> ClusterTree:
        """Return the tree, with a branch for each level of several parts."""
        # Each site is a tree of its own at first; the loop below joins sites to regions.
        sites = [self._site(site) for site in self._site_nodes]
        by_name = dict(zip(self._site_nodes, sites, strict=True))
        groups = [frozenset([site]) for site in self._site_nodes]
        branches: dict[frozenset[str], Branch] = {
            group: by_name[site] for group in groups for site in group
        }
        seconds = self._site_seconds()
        # Each pass joins at least the two nearest groups, so that the loop ends with one group.
        while len(groups) > 1:
            groups, branches = self._joined(groups, branches, seconds)
        root = branches[groups[0]]
        # A root with a single child adds a hop that no message crosses.
        while len(root.children) == 1:
            root = root.children[0]
        tree = LinkTree(Branch(root.name, root.children, device=root.device))
        # The tree numbers its leaves from left to right, the caller has an order of its own.
        place = {name: i for i, name in enumerate(tree.holder_names)}
        places = tuple(place[holder[0].name] for holder in self._holders)
        if self._unlike:
            self._remarks.append(
                f"links between {self._unlike[0]} and the nodes of its site differ"
                f"{f', and of {len(self._unlike) - 1} others' if len(self._unlike) > 1 else ''}; "
                "in the tree each has one uplink, as fast as its fastest link"
            )
        return ClusterTree(tree, places, tuple(dict.fromkeys(self._remarks)))

    def _used_nodes(self) -> list[Node]:
        if not self._holders:
            raise ClusterError("an exchange needs holders, and none are given")
        used: dict[str, Node] = {}
        for number, holder in enumerate(self._holders):
            nodes = {device.node for device in holder}
            if len(nodes) != 1:
                names = ", ".join(device.name for device in holder) or "none"
                raise ClusterError(
                    f"holder {number} has the devices {names}; those of a holder are on one node"
                )
            for name in nodes:
                if name not in self._cluster.node_by_name:
                    raise ClusterError(
                        f"holder {number} is on node {name!r}, which "
                        f"{self._cluster.source or 'the cluster'} does not have; its nodes are "
                        f"{', '.join(self._cluster.node_by_name)}"
                    )
                used[name] = self._cluster.node_by_name[name]
        return [node for node in self._cluster.nodes if node.name in used]

    # Inside a site

    def _site(self, site: str) -> Branch:
        machines: dict[str, list[Node]] = {}
        for node in self._site_nodes[site]:
            machines.setdefault(node.machine, []).append(node)
        children = tuple(self._machine(name, nodes) for name, nodes in machines.items())
        return Branch(f"site {site}", children)

    def _machine(self, name: str, islands: list[Node]) -> Branch:
        # One node is the whole machine: the node itself gets the machine's uplink.
        if len(islands) == 1:
            return self._node(islands[0], f"node {islands[0].name}", self._outward(islands))
        # Islands of a machine reach each other through the root complex, which caps each of them.
        inside = [self._links(island, islands) for island in islands]
        shared = islands[0].root_complex_bytes_per_s
        children = tuple(
            self._node(
                island,
                f"node {island.name}",
                Link(
                    min(shared, max(link.bytes_per_s for link in links)),
                    max(link.latency_s for link in links) / 2,
                    incast=_incast(links),
                ),
            )
            for island, links in zip(islands, inside, strict=True)
        )
        return Branch(f"machine {name}", children, self._outward(islands))

    def _node(self, node: Node, name: str, up: Link) -> Branch:
        leaves = []
        # Adding goes at the slowest rate of all links of the node that the exchange uses.
        reduce_rates = [node.link.reduce_bytes_per_s]
        reduce_rates += [link.reduce_bytes_per_s for link in self._links(node, self._nodes)]
        for holder in self._holders:
            if holder[0].node != node.name:
                continue
            # Devices of a holder send side by side: their bandwidths add up, their latencies do
            # not.
            num = len(holder)
            rate = num * min(reduce_rates)
            link = Link(
                num * node.link.bytes_per_s, node.link.latency_s / 2, incast=node.link.incast
            )
            terms = DeviceTerms(0.0, 0.0 if rate == inf else 1 / rate)
            leaves.append(Branch(holder[0].name, (), link, None, terms))
        return Branch(name, tuple(leaves), up)

    def _outward(self, islands: Sequence[Node]) -> Link:
        """Return the uplink of a machine: what it sends to any one other, of its site if any."""
        machine = islands[0].machine
        # Machines of the own site set the latency; machines of other sites add theirs higher in the
        # tree.
        others = [n for n in self._nodes if n.machine != machine]
        near = [n for n in others if n.site == islands[0].site]
        links = self._links(islands[0], near or others)
        if not links:
            return Link(inf, 0.0)
        speeds = [link.bytes_per_s for link in links]
        far = self._links(islands[0], others)
        if near and max(speeds) > _ALIKE * min(speeds):
            self._unlike.append(machine)
        # A message crosses the device's own link first, whose half of the latency is counted there.
        inside_s = islands[0].link.latency_s / 2
        return Link(
            min(islands[0].uplink_bytes_per_s, max(link.bytes_per_s for link in far)),
            max(0.0, max(link.latency_s for link in links) / 2 - inside_s) if near else 0.0,
            incast=_incast(far),
        )

    def _links(self, node: Node, others: Sequence[Node]) -> list[Link]:
        found = []
        for other in others:
            if other is node:
                continue
            try:
                found.append(self._cluster.node_links[other.name, node.name])
                found.append(self._cluster.node_links[node.name, other.name])
            except KeyError:
                raise ClusterError(
                    f"{self._cluster.source or 'the cluster'} has no link between {node.name!r} "
                    f"and {other.name!r}, which exchange gradients; give one under `links`"
                ) from None
        return list(dict.fromkeys(found))

    # Between sites

    def _site_seconds(self) -> dict[tuple[str, str], float]:
        """Return, by both orders of two sites, how long a piece takes; the longer direction."""
        usual = self._cluster.link_summary.usual
        found = {}
        for a, b in product(self._site_nodes, repeat=2):
            # Links between sites may be slower in one direction, and the slower one decides.
            if a < b:
                links = [usual[a, b], usual[b, a]]
                seconds = max(k.latency_s + _PIECE_BYTES / k.bytes_per_s for k in links)
                found[a, b] = found[b, a] = seconds
        return found

    def _joined(
        self,
        groups: list[frozenset[str]],
        branches: dict[frozenset[str], Branch],
        seconds: Mapping[tuple[str, str], float],
    ) -> tuple[list[frozenset[str]], dict[frozenset[str], Branch]]:
        """Join groups connected by links of the nearest kind, each group with an uplink."""
        # Join groups whose links are about as fast as the fastest.
        between = {
            (i, j): min(seconds[a, b] for a, b in product(one, other))
            for i, one in enumerate(groups)
            for j, other in enumerate(groups)
            if i < j
        }
        near_s = _ALIKE * min(between.values())
        # Label propagation: each fast link gives both ends' parts one number.
        part = list(range(len(groups)))
        for (i, j), s in between.items():
            if s <= near_s and part[i] != part[j]:
                old = part[j]
                part = [part[i] if p == old else p for p in part]
        # Each joined set becomes a branch, its groups the children with uplinks to each other.
        made: list[frozenset[str]] = []
        found: dict[frozenset[str], Branch] = {}
        for number in dict.fromkeys(part):
            own = [group for group, p in zip(groups, part, strict=True) if p == number]
            whole: frozenset[str] = frozenset().union(*own)
            made.append(whole)
            if len(own) == 1:
                found[whole] = branches[own[0]]
                continue
            self._remark(own, between, groups)
            children = tuple(
                self._with_uplink(branches[group], group, [o for o in own if o is not group])
                for group in own
            )
            name = "cluster" if len(whole) == len(self._site_nodes) else f"region of {min(whole)}"
            found[whole] = Branch(name, children)
        return made, found

    def _remark(
        self,
        own: Sequence[frozenset[str]],
        between: Mapping[tuple[int, int], float],
        groups: Sequence[frozenset[str]],
    ) -> None:
        numbers = [groups.index(group) for group in own]
        # Only a mesh of unlike links loses something when each part gets a single uplink.
        times = [s for (i, j), s in between.items() if i in numbers and j in numbers]
        if max(times) > _ALIKE * min(times):
            names = ", ".join(min(group) for group in own[:6])
            self._remarks.append(
                f"links between the sites of {names}{' and others' if len(own) > 6 else ''} make "
                "a mesh of unlike links; in the tree each has one uplink, with the latency of its "
                "farthest"
            )

    def _with_uplink(
        self, branch: Branch, group: frozenset[str], others: Sequence[frozenset[str]]
    ) -> Branch:
        usual = self._cluster.link_summary.usual
        links = [
            usual[pair]
            for other in others
            for a, b in product(group, other)
            for pair in ((a, b), (b, a))
        ]
        # What lies below already has half of its own latency; the uplink adds the rest.
        inside_s = max(
            child.up.latency_s if child.up else 0.0 for child in branch.children
        ) if branch.children else 0.0  # fmt: skip
        latency_s = max(0.0, max(link.latency_s for link in links) / 2 - inside_s)
        # The way up carries no limit of senders: incast is a matter of the receiver, hence of
        # `down`.
        up = Link(max(self._most(group, other) for other in others), latency_s)
        down = Link(
            max(self._most(other, group) for other in others), latency_s, incast=_incast(links)
        )
        return Branch(branch.name, branch.children, up, down, branch.device)

    def _most(self, senders: frozenset[str], receivers: frozenset[str]) -> float:
        """Return bytes/s from `senders` to `receivers`: the sum over node pairs, capped by the
        lines that site pairs share."""
        cluster = self._cluster
        speed: dict[Line, float] = {}
        # Node pairs of two sites work side by side, each on a path of its own.
        for a, b in product(sorted(senders), sorted(receivers)):
            num = min(len(self._site_nodes[a]), len(self._site_nodes[b]))
            own = num * cluster.link_summary.usual[a, b].bytes_per_s
            lines = cluster.site_lines.get((a, b), ())
            line = min(lines, key=lambda k: k.bytes_per_s, default=Line(f"{a} {b}", inf))
            speed[line] = speed.get(line, 0.0) + own
        return sum(min(s, line.bytes_per_s) for line, s in speed.items())


def _incast(links: Sequence[Link]) -> Incast | None:
    """Return the limit of senders common to all links; None if limits differ."""
    limits = {link.incast for link in links}
    return limits.pop() if len(limits) == 1 else None
