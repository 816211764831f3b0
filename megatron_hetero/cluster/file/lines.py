"""The lines of a cluster file: capacities shared by sites, from `between_sites` and uplinks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from math import inf

from megatron_hetero.cluster.file.islands import Island
from megatron_hetero.cluster.file.references import References
from megatron_hetero.cluster.file.schema import LinksSection, SiteSection
from megatron_hetero.cluster.lines import Line, SitePair
from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.node_links import Link, NodeLinks


def resolve_site_lines(
    section: LinksSection,
    site_sections: Mapping[str, SiteSection],
    entries: Mapping[SitePair, int],
    links: NodeLinks,
    references: References,
) -> dict[SitePair, tuple[Line, ...]]:
    """Return the lines from each site to every other site, in the order of a byte's path.

    A line is as fast as its entry of `between_sites` says, or as the fastest measured pair of nodes
    that it joins.

    Args:
        entries: of each pair of sites its entry of `between_sites`.
        links: with the measured pairs.
    Raises:
        ClusterError: an uplink of a site that is not there.
    """
    # Uplinks of sites that exist.
    for site in site_sections:
        references.check(["sites", site], "site", site, references.sites)
    uplinks = {name: site.uplink for name, site in site_sections.items() if site.uplink}
    # A measured pair may be faster than its entry says: then the line is, too.
    # (site, site) -> the fastest measured pair between the two.
    measured: dict[SitePair, float] = {}
    for (a, b), link in links.pair_links.items():
        pair = links.sites[a], links.sites[b]
        measured[pair] = max(measured.get(pair, 0.0), link.bytes_per_s)
    # Entry -> the fastest of all pairs of sites that it is for.
    fastest: dict[int, float] = {}
    for pair, index in entries.items():
        entry = section.between_sites[index]
        speed = max(entry.bandwidth, measured.get(pair, 0.0))
        fastest[index] = max(fastest.get(index, 0.0), speed)
    # On a byte's way: out of its site, over the entry's line or backbone, into the other site.
    found: dict[SitePair, tuple[Line, ...]] = {}
    for here, there in product(references.sites, references.sites):
        if here == there:
            continue
        lines = []
        if here in uplinks:
            lines.append(Line(f"uplink of site {here} out", uplinks[here]))
        # Sites without an entry are joined by measured pairs alone, which share no line.
        number = entries.get((here, there))
        if number is not None:
            entry = section.between_sites[number]
            # One line for each pair of sites, and each direction.
            if entry.shared == "pair":
                speed = max(entry.bandwidth, measured.get((here, there), 0.0))
                lines.append(Line(f"line {here} -> {there}", speed))
            elif entry.shared == "all":
                # One backbone for all sites of the entry; their order names its directions.
                forth = entry.sites.index(here) < entry.sites.index(there)
                way = "forth" if forth else "back"
                name = f"backbone {', '.join(entry.sites)} ({way})"
                lines.append(Line(name, fastest[number]))
        if there in uplinks:
            lines.append(Line(f"uplink of site {there} in", uplinks[there]))
        if lines:
            found[here, there] = tuple(lines)
    return found


def capped(
    links: NodeLinks,
    nodes: Sequence[Island],
    site_lines: Mapping[SitePair, Sequence[Line]],
    uplinks: Mapping[str, float],
) -> NodeLinks:
    """Slow down links that are faster than a line on the path.

    Args:
        links: of each pair of nodes.
        nodes: with their sites.
        site_lines: by (site, site), the lines of each pair.
        uplinks: of each node, infinite where it has none.
    """
    # The fastest way out of each site's nodes limits the links between sites.
    fastest: dict[str, float] = {}
    for node in nodes:
        fastest[node.site] = max(fastest.get(node.site, 0.0), uplinks[node.name])

    # The slowest line on the way limits what a link can carry.
    def most(here: str, there: str) -> float:
        return min((line.bytes_per_s for line in site_lines.get((here, there), ())), default=inf)

    site_links = {
        (a, b): _no_faster(link, min(most(a, b), fastest.get(a, inf), fastest.get(b, inf)))
        for (a, b), link in links.site_links.items()
    }
    # Pairs slower than their sites' link, and measured pairs, each by their own uplinks.
    pair_links = dict(_slower_pairs(nodes, uplinks, fastest, site_links))
    for (a, b), link in links.pair_links.items():
        sites = links.sites[a], links.sites[b]
        # Islands of one machine are joined inside it, where no uplink counts.
        if machine_of(a) == machine_of(b):
            pair_links[a, b] = link
            continue
        pair_links[a, b] = _no_faster(link, min(most(*sites), uplinks[a], uplinks[b]))
    return NodeLinks(links.sites, site_links, pair_links)


def _slower_pairs(
    nodes: Sequence[Island],
    uplinks: Mapping[str, float],
    fastest: Mapping[str, float],
    site_links: Mapping[SitePair, Link],
) -> Iterator[tuple[tuple[str, str], Link]]:
    """Yield the pairs with an uplink slower than the fastest of the site."""
    # Equal uplinks leave the class of the site as it is.
    if all(uplinks[node.name] >= fastest[node.site] for node in nodes):
        return
    for a, b in combinations(nodes, 2):
        if a.section is b.section:
            continue
        speed = min(uplinks[a.name], uplinks[b.name])
        # Both directions, which may be of unlike speed.
        for one, other in ((a, b), (b, a)):
            link = site_links.get((one.site, other.site))
            if link is not None and speed < link.bytes_per_s:
                yield (one.name, other.name), _no_faster(link, speed)


def _no_faster(link: Link, bytes_per_s: float) -> Link:
    return link if link.bytes_per_s <= bytes_per_s else replace(link, bytes_per_s=bytes_per_s)
