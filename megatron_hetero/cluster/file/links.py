"""The links of a cluster file: from classes and measured pairs to one link for each pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, combinations_with_replacement, product
from math import inf
from typing import NoReturn, Protocol

from megatron_hetero.cluster.file.references import References, listed
from megatron_hetero.cluster.file.schema import LinkSection, LinksSection
from megatron_hetero.cluster.graph import connected_parts
from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.node_links import Incast, Link, NodeLinks, NodePair


class Placed(Protocol):
    """Node, or island of a node, with the fields on which links between nodes depend."""

    @property
    def name(self) -> str: ...

    @property
    def site(self) -> str: ...


def resolve_node_links(
    section: LinksSection,
    nodes: Sequence[Placed],
    inside: Mapping[NodePair, Link],
    references: References,
) -> NodeLinks:
    """Link every pair of nodes in both directions; a measured pair beats the classes.

    Args:
        section: the file's `links`.
        nodes: all nodes, islands apart.
        inside: links between islands of one machine, both orders.
    Raises:
        ClusterError: a link names what is not there or is given twice, or two nodes have none; when
            the cluster falls apart, the message names two of its parts.
    """
    _check_names(section, references)
    # Links inside machines, then measured pairs, for all islands of both machines.
    pair_links = dict(inside)
    # Machine -> its nodes, as a measured pair is of machines.
    names_of: dict[str, list[str]] = {}
    for node in nodes:
        names_of.setdefault(machine_of(node.name), []).append(node.name)
    for measured in section.measured:
        for a, b in product(*(names_of[machine] for machine in measured.nodes)):
            pair_links[a, b] = pair_links[b, a] = resolve_link(measured)
    # Classes link the other pairs; refuse a cluster with pairs that nothing links.
    sites = {node.name: node.site for node in nodes}
    links = NodeLinks(sites, _site_links(section, references), pair_links)
    missing = list(_missing(links, nodes))
    if missing:
        _fail_missing(missing, links, [node.name for node in nodes], references)
    return links


def resolve_link(section: LinkSection) -> Link:
    """Build the link that a section describes."""
    # An incast that slows nothing is none.
    incast = None
    if section.incast is not None and section.incast.slowdown:
        incast = Incast(section.incast.senders, section.incast.slowdown)
    # Without a bandwidth, adding up hides behind the link.
    reduce_bytes_per_s = section.reduce_bandwidth or inf
    groups = tuple(sorted((ring.size, ring.bandwidth) for ring in section.groups))
    return Link(
        section.bandwidth, section.latency, section.jitter, reduce_bytes_per_s, incast, groups
    )


def _site_links(section: LinksSection, references: References) -> dict[tuple[str, str], Link]:
    """Return links by (site, site), both orders; a site with itself is the path between its
    nodes."""
    links = {
        pair: resolve_link(section.between_sites[index])
        for pair, index in entry_of_sites(section, references).items()
    }
    inside = section.between_nodes
    # One link for all sites, or one by site; a site without any has none between its nodes.
    for site in references.sites:
        found = inside.get(site) if isinstance(inside, dict) else inside
        if found is not None:
            links[site, site] = resolve_link(found)
    return links


def entry_of_sites(section: LinksSection, references: References) -> dict[tuple[str, str], int]:
    """Choose, by (site, site) in both orders, the entry of `between_sites` that counts: the
    shortest list that holds both sites.

    Raises:
        ClusterError: two lists are equally short.
    """
    entries: dict[tuple[str, str], int] = {}
    lists = [between.sites for between in section.between_sites]
    # The shortest lists first, so that the first entry of a pair of sites is the one that counts.
    for index in sorted(range(len(lists)), key=lambda index: len(lists[index])):
        for a, b in combinations(lists[index], 2):
            known = entries.setdefault((a, b), index)
            entries[b, a] = known
            if known != index and len(lists[known]) == len(lists[index]):
                references.fail(
                    ["links", "between_sites", index, "sites"],
                    f"{listed((a, b))} are both in between_sites[{known}] too, which has as many "
                    "sites; the shortest list that holds two sites counts for them, so make one "
                    "of the two shorter or longer",
                )
    return entries


def _missing(links: NodeLinks, nodes: Sequence[Placed]) -> Iterator[tuple[Placed, Placed]]:
    """Find the pairs of nodes without a link, looking at nodes only where their sites have none."""
    nodes_of: dict[str, list[Placed]] = {}
    for node in nodes:
        nodes_of.setdefault(node.site, []).append(node)
    # Pairs of sites, each site with itself too: two nodes of it need a link as well.
    for one, other in combinations_with_replacement(nodes_of, 2):
        if (one, other) in links.site_links:
            continue
        ones, others = nodes_of[one], nodes_of[other]
        pairs = combinations(ones, 2) if one == other else product(ones, others)
        yield from ((a, b) for a, b in pairs if (a.name, b.name) not in links.pair_links)


def _fail_missing(
    missing: Sequence[tuple[Placed, Placed]],
    links: NodeLinks,
    names: Sequence[str],
    references: References,
) -> NoReturn:
    # Parts of the cluster that any links join, to name two that none does.
    parts = connected_parts(names, links)
    part_of = {name: i for i, part in enumerate(parts) for name in part}
    # A pair of two parts says more than a pair that others join.
    a, b = min(missing, key=lambda pair: part_of[pair[0].name] == part_of[pair[1].name])
    if a.site == b.site:
        remedy = f"links.between_nodes (site {a.site})"
    else:
        remedy = f"links.between_sites (sites: [{a.site}, {b.site}])"
    remedy += f" or links.measured (nodes: [{a.name}, {b.name}])"
    if len(parts) > 1:
        sides = f"{listed(parts[part_of[a.name]])} with {listed(parts[part_of[b.name]])}"
        references.fail(["links"], f"the cluster is not connected: no link joins {sides}; "
                                   f"add {remedy}")  # fmt: skip
    references.fail(["links"], f'no link joins "{a.name}" with "{b.name}"; add {remedy}')


def _check_names(section: LinksSection, references: References) -> None:
    """Refuse links of unknown sites or nodes, and pairs that are given twice."""
    if isinstance(section.between_nodes, dict):
        for site in section.between_nodes:
            references.check(["links", "between_nodes", site], "site", site, references.sites)
    _check_pairs("between_sites", "sites", [s.sites for s in section.between_sites], references)
    _check_pairs("measured", "nodes", [s.nodes for s in section.measured], references)


def _check_pairs(
    key: str, member: str, pairs: Sequence[tuple[str, ...]], references: References
) -> None:
    kind = member.removesuffix("s")
    known = references.sites if member == "sites" else references.nodes
    # Sets of names, as the order of a pair does not count.
    first: dict[frozenset[str], int] = {}
    for i, pair in enumerate(pairs):
        for j, name in enumerate(pair):
            references.check(["links", key, i, member, j], kind, name, known)
        twice = next((name for name in pair if pair.count(name) > 1), None)
        if twice is not None:
            inside = "links.between_nodes" if kind == "site" else "nodes[].link"
            references.fail(
                ["links", key, i, member],
                f'"{twice}" stands here twice; the link inside one {kind} is {inside}',
            )
        if first.setdefault(frozenset(pair), i) != i:
            references.fail(
                ["links", key, i, member],
                f"{listed(pair)} is {key}[{first[frozenset(pair)]}] already (a link holds for "
                "both directions); keep one",
            )
