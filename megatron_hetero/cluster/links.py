"""The links of a cluster file: from classes and measured pairs to one link for each pair."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import NoReturn

from megatron_hetero.cluster.graph import connected_parts
from megatron_hetero.cluster.references import References, listed
from megatron_hetero.cluster.schema import LinkSection, LinksSection, NodeSection
from megatron_hetero.cluster.spec import Link


def resolve_node_links(
    section: LinksSection, nodes: Sequence[NodeSection], references: References
) -> dict[tuple[str, str], Link]:
    """Both directions of every pair of nodes; a measured pair beats the classes.

    Raises:
        ClusterError: a link names what is not there or is given twice, or two nodes have none; when
            the cluster falls apart, the message names two of its parts.
    """
    _check_names(section, references)
    measured = {frozenset(m.nodes): resolve_link(m) for m in section.measured}
    links: dict[tuple[str, str], Link] = {}
    missing: list[tuple[NodeSection, NodeSection]] = []
    for a, b in combinations(nodes, 2):
        link = measured.get(frozenset((a.name, b.name))) or _class_link(section, a.site, b.site)
        if link is None:
            missing.append((a, b))
        else:
            links[a.name, b.name] = links[b.name, a.name] = link
    if missing:
        _fail_missing(missing, links, references)
    return links


def resolve_link(section: LinkSection) -> Link:
    """The link that a section describes."""
    return Link(section.bandwidth, section.latency)


def _class_link(section: LinksSection, site: str, other_site: str) -> Link | None:
    if site != other_site:
        for between in section.between_sites:
            if set(between.sites) == {site, other_site}:
                return resolve_link(between)
        return None
    between_nodes = section.between_nodes
    if isinstance(between_nodes, dict):
        between_nodes = between_nodes.get(site)
    return resolve_link(between_nodes) if between_nodes else None


def _fail_missing(
    missing: Sequence[tuple[NodeSection, NodeSection]],
    links: dict[tuple[str, str], Link],
    references: References,
) -> NoReturn:
    parts = connected_parts(references.nodes, links)
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
    """Refuse links of what is not there, and pairs that are given twice."""
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
    first: dict[frozenset[str], int] = {}
    for i, pair in enumerate(pairs):
        for j, name in enumerate(pair):
            references.check(["links", key, i, member, j], kind, name, known)
        if len(set(pair)) == 1:
            inside = "links.between_nodes" if kind == "site" else "nodes[].link"
            references.fail(
                ["links", key, i, member],
                f'"{pair[0]}" stands here twice; the link inside one {kind} is {inside}',
            )
        if first.setdefault(frozenset(pair), i) != i:
            references.fail(
                ["links", key, i, member],
                f"{listed(pair)} is {key}[{first[frozenset(pair)]}] already (a link holds for "
                "both directions); keep one",
            )
