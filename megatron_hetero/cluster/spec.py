"""The cluster as the planner sees it: frozen data, SI units, no files and no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf

from megatron_hetero.cluster.doubt import Doubt
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.lines import Line, SitePair, node_uplink
from megatron_hetero.cluster.link_classes import LinkClasses, classify_links
from megatron_hetero.cluster.makers import Library
from megatron_hetero.cluster.names import device_place, machine_of
from megatron_hetero.cluster.nics import nic_name
from megatron_hetero.cluster.node_links import (
    Link,
    LinkSummary,
    NodePair,
    mapped_links,
    summarise_links,
)
from megatron_hetero.cluster.nodes import Device, GpuType, Node
from megatron_hetero.cluster.site_tour import site_tour
from megatron_hetero.errors import UsageError


@dataclass(frozen=True)
class Cluster:
    """Nodes and the links between them.

    `node_links[(a, b)]` (node names, both orders present) is the path between one GPU of `a` and
    one GPU of `b`; `cluster.file.description` fills it from link classes and measured pairs, and
    refuses a cluster in which one is missing.  `prices_per_gb[(a, b)]` (site names, both orders) is
    what 1e9 bytes from one site to the other cost; what is not there costs nothing.
    `site_lines[(a, b)]` (sender first) are the lines that all paths from site a to site b share;
    no link is faster than a line that it leads over.
    """

    nodes: tuple[Node, ...]
    node_links: Mapping[NodePair, Link]
    limits: Limits = field(default_factory=Limits)
    source: str = ""
    prices_per_gb: Mapping[tuple[str, str], float] = field(default_factory=dict)
    site_lines: Mapping[SitePair, tuple[Line, ...]] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = field(default=(), compare=False)
    """Statements of the file that it contradicts itself; `plan` and `doctor` show them."""
    kept_to: Library | None = None
    """Library to which a search keeps, if the limits leave the choice open."""
    file_limits: Limits | None = None
    """Limits of the file, where an option or a search keeps to further limits (`limited`)."""

    def __hash__(self) -> int:
        """Return a hash of the machines; mappings, and GPUs with them, have none."""
        return hash(tuple((node.name, node.host, node.num_gpus) for node in self.nodes))

    @property
    def library(self) -> Library | None:
        """Return the library of all usable GPUs; None if nothing restricts the choice."""
        return self.limits.library or self.kept_to

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return every GPU, machine by machine in file order, in a machine in the order of its
        bus."""
        # Islands of a machine share its bus, so their GPUs are sorted together.
        return tuple(
            device
            for islands in self.machines.values()
            for device in sorted((d for n in islands for d in n.devices), key=lambda d: d.index)
        )

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        """Map names to nodes (islands apart)."""
        return {n.name: n for n in self.nodes}

    @cached_property
    def machines(self) -> dict[str, tuple[Node, ...]]:
        """Map each machine of the file to its nodes: itself, or its islands."""
        found: dict[str, tuple[Node, ...]] = {}
        for node in self.nodes:
            found[node.machine] = (*found.get(node.machine, ()), node)
        return found

    @cached_property
    def device_by_name(self) -> dict[str, Device]:
        """Map the names of GPUs in files, "machine:index", to GPUs."""
        return {device.name: device for device in self.devices}

    def node_of(self, device: str) -> Node:
        """Return the node of the GPU called "machine:index".

        Raises:
            KeyError: the cluster has no such GPU.
        """
        return self.node_by_name[self.device_by_name[device].node]

    def without(self, names: Sequence[str]) -> Cluster:
        """Return the cluster without the given machines or GPUs, as `limits: {idle: ...}` in its
        file would have it.

        Raises:
            UsageError: there is no such machine or GPU, or none is left.
        """
        left = set(self.device_by_name)
        for name in names:
            # A name is a GPU or a machine, of which all GPUs go.
            gone = {d for d in self.device_by_name if name in (d, device_place(d)[0])}
            if not gone:
                known = ", ".join(self.machines)
                raise UsageError(f'there is no machine or GPU "{name}"; machines are {known}')
            left -= gone
        if not left:
            raise UsageError(f"without {', '.join(names)} no GPU is left to plan for")
        idle = tuple(dict.fromkeys((*self.limits.idle_devices, *names)))
        return self.limited(replace(self.limits, idle_devices=idle))

    def limited(self, limits: Limits) -> Cluster:
        """Return the cluster with other limits than its file has, and still of that file."""
        return replace(self, limits=limits, file_limits=self.file_limits or self.limits)

    @cached_property
    def link_summary(self) -> LinkSummary:
        """Group the links between nodes by pairs of sites."""
        return summarise_links({n.name: n.site for n in self.nodes}, self.node_links)

    @cached_property
    def link_classes(self) -> LinkClasses:
        """Group all links by value."""
        return classify_links(self.nodes, self.link_summary, self.site_places)

    @cached_property
    def site_places(self) -> dict[str, int]:
        """Return the place of each site on the tour of rings (`site_tour`)."""
        tour = site_tour([node.site for node in self.nodes], self.link_summary.usual)
        return {site: place for place, site in enumerate(tour)}

    @cached_property
    def without_link_terms(self) -> Cluster:
        """Return the same cluster with links of latency and bandwidth alone; itself if they are."""
        links = self.link_summary
        # Inner links count too: a ring inside a node has terms as well.
        every = (*(n.link for n in self.nodes), *links.usual.values(), *links.others.values())
        if not any(link.terms for link in every):
            return self
        return replace(
            self,
            nodes=tuple(replace(n, link=n.link.without_terms) for n in self.nodes),
            node_links=mapped_links(self.node_links, lambda link: link.without_terms),
        )

    @cached_property
    def has_lines(self) -> bool:
        """Return whether paths between nodes share anything."""
        return bool(self.site_lines) or any(
            n.is_island or n.uplink_bytes_per_s != inf for n in self.nodes
        )

    def lines(self, here: str, there: str) -> tuple[Line, ...]:
        """Return the lines on the path between two nodes that are shared with further pairs, in the
        order of a byte's path; empty inside a node."""
        # Each pair is computed once, as a search asks for it again and again.
        key = here, there
        if key not in self._lines:
            self._lines[key] = self._lines_between(here, there) if here != there else ()
        return self._lines[key]

    @cached_property
    def _lines(self) -> dict[NodePair, tuple[Line, ...]]:
        return {}

    def _lines_between(self, here: str, there: str) -> tuple[Line, ...]:
        one, other = self.node_by_name[here], self.node_by_name[there]
        # Inside a machine islands share the root complex, if its capacity is given.
        if one.machine == other.machine:
            if one.root_complex_bytes_per_s == inf:
                return ()
            return (Line(f"root complex of {one.machine}", one.root_complex_bytes_per_s),)
        shared = self.site_lines.get((one.site, other.site), ())
        if one.is_island or other.is_island:
            # Two machines are joined by one path, whichever of their islands use it.
            name = f"path {one.machine} -> {other.machine}"
            shared = Line(name, self.node_links[here, there].bytes_per_s), *shared
        # In the order of a byte's path: out of the sender's machine first.
        if one.uplink_bytes_per_s != inf:
            shared = node_uplink(one.machine, one.uplink_bytes_per_s)[0], *shared
        if other.uplink_bytes_per_s != inf:
            shared = *shared, node_uplink(other.machine, other.uplink_bytes_per_s)[1]
        return shared

    @cached_property
    def without_nics(self) -> Cluster:
        """Return the same cluster with all NICs of a machine shared by its GPUs: nothing is
        slower."""
        if not self.has_nics:
            return self
        links = mapped_links(self.node_links, lambda link: replace(link, nic_bytes_per_s=inf))
        return replace(
            self, nodes=tuple(replace(n, nics=None) for n in self.nodes), node_links=links
        )

    @cached_property
    def has_nics(self) -> bool:
        """Return whether a machine has several NICs, not a single NIC for all GPUs."""
        return any(node.nics is not None for node in self.nodes)

    def nic_of(self, device: Device) -> str:
        """Return the NIC over which a GPU sends: `NIC 0 of a`, or the one that all GPUs of its node
        share, by the node's name."""
        number = self.nic_number(device)
        return device.node if number is None else nic_name(machine_of(device.node), number)

    def nic_number(self, device: Device) -> int | None:
        """Return the number of the NIC near a GPU; None if the machine is described with a single
        NIC."""
        nics = self.node_by_name[device.node].nics if self.has_nics else None
        return None if nics is None else nics.near[device.index]

    def nic_bytes_per_s(self, device: Device, link: Link) -> float:
        """Return what the NIC near a GPU carries over a link to another node; infinite where its
        machine has no NICs of its own."""
        nics = self.node_by_name[device.node].nics
        return inf if nics is None else min(nics.bytes_per_s, link.nic_bytes_per_s)

    def is_path_of_nics(self, here: str, there: str) -> bool:
        """Return whether NICs alone limit the messages between two nodes."""
        ends = [self.node_by_name[name].nics for name in (here, there)]
        return None not in ends and self.node_links[here, there].nic_bytes_per_s < inf

    def lines_beside_nics(self, here: str, there: str) -> tuple[Line, ...]:
        """Return `lines` without the uplinks that are but the sum of a machine's NICs."""
        if not self.has_nics:
            return self.lines(here, there)
        # An uplink as fast as all NICs together limits nothing that these do not.
        sums = {
            line.name
            for node in (self.node_by_name[here], self.node_by_name[there])
            if node.nics is not None and node.uplink_bytes_per_s >= node.nics.total_bytes_per_s
            for line in node_uplink(node.machine, inf)
        }
        return tuple(line for line in self.lines(here, there) if line.name not in sums)

    def gpu_type(self, device: Device) -> GpuType:
        return self.node_by_name[device.node].gpu_type

    def path(self, sender: Device, receiver: Device) -> Link:
        """Return the path between the nodes of two devices, shared by all GPUs there; inside a
        node, the node's link."""
        if sender.node == receiver.node:
            return self.node_by_name[sender.node].link
        return self.node_links[sender.node, receiver.node]

    def link(self, sender: Device, receiver: Device) -> Link:
        """Return the path from a device to another, with no other traffic: between nodes over a
        single NIC at each end."""
        path = self.path(sender, receiver)
        if not self.has_nics or sender.node == receiver.node:
            return path
        # The slowest of path, pair and both NICs.
        ends = [self.nic_bytes_per_s(end, path) for end in (sender, receiver)]
        speed = min(path.bytes_per_s, path.nic_bytes_per_s, *ends)
        return path if speed == path.bytes_per_s else replace(path, bytes_per_s=speed)
