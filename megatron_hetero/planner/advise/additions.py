"""A cluster with one thing more: another node of each GPU type, or one class of links faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from typing import Literal

from megatron_hetero.cluster.lines import faster_lines
from megatron_hetero.cluster.node_links import Link, NodeLinks, NodePair
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.planner.advise.capacity import MoreGpus
from megatron_hetero.planner.advise.nothing_fits.relaxations import nodes_to_copy, with_more
from megatron_hetero.planner.problem import Problem
from megatron_hetero.units import format_bandwidth

FASTER = 2.0
"""Links are looked at with so many times their bandwidth."""


@dataclass(frozen=True)
class Addition:
    """One addition, and the cluster after the addition."""

    what: str
    kind: Literal["node", "link"]
    cluster: Cluster


def additions(problem: Problem) -> Iterator[Addition]:
    """Yield a node like the largest of each GPU type that can train; links inside the nodes of
    each type, between the nodes of each site and between each two sites at twice their
    bandwidth."""
    cluster = problem.cluster
    # The largest node of each type stands for a machine that one can buy.
    for node in nodes_to_copy(problem.nodes, problem.workload.training):
        grown = with_more(cluster, MoreGpus(node, node.num_gpus))
        price = "" if node.price_per_hour is None else f", {node.price_per_hour:g} an hour"
        what = (
            f"one more machine like {node.machine} ({node.num_gpus}x {node.gpu_type.name}{price})"
        )
        yield Addition(what, "node", grown)
    # Links inside nodes matter only where a node has several usable GPUs.
    for name in sorted({n.gpu_type.name for n in problem.nodes if len(problem.gpus[n.name]) > 1}):
        nodes = tuple(
            replace(n, link=_faster(n.link)) if n.gpu_type.name == name else n
            for n in cluster.nodes
        )
        what = f"links inside {name} nodes {FASTER:g} times as fast"
        yield Addition(what, "link", replace(cluster, nodes=nodes))
    used = [node.site for node in problem.nodes]
    for a, b in combinations_with_replacement(sorted(set(used)), 2):
        if a == b and used.count(a) < 2:
            # A site of one node has no network inside.
            continue
        usual = cluster.link_summary.usual.get((a, b))
        where = f"the network inside {a}" if a == b else f"the network between {a} and {b}"
        speed = "" if usual is None else f" ({format_bandwidth(FASTER * usual.bytes_per_s)})"
        what = f"{where} {FASTER:g} times as fast{speed}"
        yield Addition(what, "link", _with_faster_sites(cluster, {a, b}))


def _faster(link: Link) -> Link:
    return link.times_as_fast(FASTER)


def _with_faster_sites(cluster: Cluster, sites: set[str]) -> Cluster:
    """Return the cluster with faster links, and faster shared lines, on the paths between the given
    sites (or inside a single given site)."""
    site_of = {node.name: node.site for node in cluster.nodes}

    def changed(pairs: Mapping[NodePair, Link]) -> dict[NodePair, Link]:
        return {
            (a, b): _faster(link) if {site_of[a], site_of[b]} == sites else link
            for (a, b), link in pairs.items()
        }

    links = cluster.node_links
    # Links by class of sites stay so: a dictionary of all pairs would be large.
    if isinstance(links, NodeLinks):
        classes = {
            pair: _faster(link) if set(pair) == sites else link
            for pair, link in links.site_links.items()
        }
        links = NodeLinks(links.sites, classes, changed(links.pair_links))
    else:
        links = changed(links)
    return replace(
        cluster,
        # Uplinks and network cards of the nodes would hold faster paths back.
        nodes=tuple(n.with_faster_network(FASTER) if n.site in sites else n for n in cluster.nodes),
        node_links=links,
        site_lines=faster_lines(cluster.site_lines, FASTER, lambda pair: set(pair) == sites),
    )
