"""The cluster as the planner sees it: frozen data, SI units, no files and no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from megatron_hetero.cluster.node_links import Incast as Incast
from megatron_hetero.cluster.node_links import Link as Link
from megatron_hetero.cluster.node_links import (
    LinkSummary,
    NodePair,
    mapped_links,
    summarise_links,
)
from megatron_hetero.cluster.site_tour import site_tour


@dataclass(frozen=True)
class GpuType:
    """One kind of GPU.  Peaks are dense (no sparsity) FLOP/s; None where the chip cannot do it."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float | None]
    """Keys "bf16", "fp16", "fp32", "fp8"."""
    compute_capability: str | None
    source: str


@dataclass(frozen=True)
class Node:
    """A machine with `num_gpus` equal GPUs.  `link` joins any two of them.

    `price_per_hour` is that of the whole machine, `gpu_price_per_hour` that of each GPU in use;
    None where it is not known.  All prices are in one currency of the user's.
    """

    name: str
    gpu_type: GpuType
    num_gpus: int
    site: str
    host: str
    link: Link
    price_per_hour: float | None = None
    gpu_price_per_hour: float | None = None


class Device(NamedTuple):
    """One GPU: the `index`-th of node `node`.  Its name in files is `node:index`.

    A tuple, since the search makes and compares more of these than of anything else.
    """

    node: str
    index: int  # type: ignore[assignment]  # hides a method that nobody asks of a device

    @property
    def name(self) -> str:
        return f"{self.node}:{self.index}"


CHOICES = ("micro_batch_size", "recompute", "shares", "schedule", "optimizer_share")
"""What a plan may set for single stages or replicas, beside or against the job's own flags."""


@dataclass(frozen=True)
class Limits:
    """What the user forbids or fixes; every strategy of the planner keeps to it."""

    max_tensor_parallel: int | None = None
    max_pipeline_parallel: int | None = None
    num_replicas: int | None = None
    idle_devices: tuple[str, ...] = ()
    """Devices ("node:index") or whole nodes ("node") that stay unused."""
    first_stage_nodes: tuple[str, ...] = ()
    """Every replica's first stage is on one of these nodes (empty: anywhere)."""
    last_stage_nodes: tuple[str, ...] = ()
    no_tensor_parallel_across: tuple[str, ...] = ("nodes",)
    """Classes ("nodes", "sites") or node names inside which TP is forbidden.  A class forbids TP
    groups that span two nodes (sites); a node name forbids TP wider than 1 on that node."""
    no_data_parallel_across_sites: bool = False
    max_price_per_hour: float | None = None
    as_given: tuple[str, ...] = ()
    """Names of `CHOICES`: what every stage does as the job's flags say, not as the search finds."""
    memory_reserve_bytes: int = 1 << 30
    """Kept free on every device for the CUDA context, libraries and fragmentation."""


@dataclass(frozen=True)
class Cluster:
    """Nodes and the links between them.

    `node_links[(a, b)]` (node names, both orders present) is the path between one GPU of `a` and
    one GPU of `b`; `cluster.description` fills it from link classes and measured pairs, and refuses
    a cluster in which one is missing.  `prices_per_gb[(a, b)]` (site names, both orders) is what
    1e9 bytes from one site to the other cost; what is not there costs nothing.
    """

    nodes: tuple[Node, ...]
    node_links: Mapping[NodePair, Link]
    limits: Limits = field(default_factory=Limits)
    source: str = ""
    prices_per_gb: Mapping[tuple[str, str], float] = field(default_factory=dict)

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every GPU, node by node in file order."""
        return tuple(Device(n.name, i) for n in self.nodes for i in range(n.num_gpus))

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        return {n.name: n for n in self.nodes}

    @cached_property
    def link_summary(self) -> LinkSummary:
        """The links between nodes by pairs of sites."""
        return summarise_links({n.name: n.site for n in self.nodes}, self.node_links)

    @cached_property
    def site_places(self) -> dict[str, int]:
        """Each site's place in the order in which rings visit them (`site_tour`)."""
        tour = site_tour([node.site for node in self.nodes], self.link_summary.usual)
        return {site: place for place, site in enumerate(tour)}

    @cached_property
    def without_link_terms(self) -> Cluster:
        """The same with links of latency and bandwidth alone; itself if they are."""
        links = self.link_summary
        every = (*(n.link for n in self.nodes), *links.usual.values(), *links.others.values())
        if not any(link.terms for link in every):
            return self
        return replace(
            self,
            nodes=tuple(replace(n, link=n.link.without_terms) for n in self.nodes),
            node_links=mapped_links(self.node_links, lambda link: link.without_terms),
        )

    def gpu_type(self, device: Device) -> GpuType:
        return self.node_by_name[device.node].gpu_type

    def link(self, sender: Device, receiver: Device) -> Link:
        """Path from one device to another (not itself)."""
        if sender.node == receiver.node:
            return self.node_by_name[sender.node].link
        return self.node_links[sender.node, receiver.node]
