"""NICs of cluster files: the one near each GPU, and what they do to links between machines."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, permutations
from math import inf

from megatron_hetero.cluster.doubt import Doubt
from megatron_hetero.cluster.file.islands import Island
from megatron_hetero.cluster.file.references import References
from megatron_hetero.cluster.file.schema import LinkSection, LinksSection, NodeSection
from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.nics import Nics, near_in_order
from megatron_hetero.cluster.node_links import Link, NodeLinks
from megatron_hetero.units import format_bandwidth


def nics_of(place: int, section: NodeSection, references: References) -> Nics | None:
    """Return the NICs of a machine; None where its entry has none.

    Args:
        place: the machine's number in the file.
    Raises:
        ClusterError: there are more than GPUs, or a GPU is not near exactly one.
    """
    nics = section.nics
    if nics is None:
        return None
    keypath, num_gpus = ("nodes", place, "nics"), section.num_cards
    if nics.count > num_gpus:
        references.fail(
            (*keypath, "count"),
            f"{nics.count} NICs for {num_gpus} GPU{'s' * (num_gpus > 1)}: a GPU sends over one; "
            "write as many as GPUs, each with the bandwidth that a GPU gets",
        )
    # Without lists, GPUs take the NICs in order.
    if not nics.gpus:
        return Nics(nics.bandwidth, near_in_order(num_gpus, nics.count))
    if len(nics.gpus) != nics.count:
        references.fail(
            (*keypath, "gpus"),
            f"{len(nics.gpus)} lists for {nics.count} NICs; write one for each, for example "
            "[[0, 1], [2, 3]]",
        )
    # With lists, each GPU stands in exactly one.
    # GPU -> the number of its NIC.
    near: dict[int, int] = {}
    for number, gpus in enumerate(nics.gpus):
        at = (*keypath, "gpus", number)
        if not gpus:
            references.fail(at, f"no GPU is near NIC {number}; leave such a NIC out of the count")
        for gpu in gpus:
            if gpu >= num_gpus:
                references.fail(
                    at,
                    f"machine {section.name} has no GPU {gpu}; it has {num_gpus} "
                    f"(0-{num_gpus - 1})",
                )
            if near.setdefault(gpu, number) != number or gpus.count(gpu) > 1:
                references.fail(at, f"GPU {gpu} stands in two places; a GPU sends over one NIC")
    left = [gpu for gpu in range(num_gpus) if gpu not in near]
    if left:
        references.fail(
            (*keypath, "gpus"),
            f"GPU {left[0]} is near no NIC; write every GPU of the machine into one of the lists",
        )
    return Nics(nics.bandwidth, tuple(near[gpu] for gpu in range(num_gpus)))


def with_nics(links: NodeLinks, nodes: Sequence[Island], nics: Mapping[str, Nics]) -> NodeLinks:
    """Widen the links between machines of the same site that have NICs: the speed that the file
    gives for a pair of GPUs is multiplied by the NICs side by side.

    A link between sites stays one path for all GPUs of two machines.

    Args:
        links: of each pair of nodes, as one pair of GPUs sees them.
        nodes: all nodes, islands apart.
        nics: by the name of the machine.
    """
    if not nics:
        return links
    # A site with machines of one kind keeps one class of links.
    # Site -> kinds of machines: NICs of equal number and speed make equal links.
    of_site: dict[str, set[Nics | None]] = {}
    for node in nodes:
        own = nics.get(machine_of(node.name))
        of_site.setdefault(node.site, set()).add(own and replace(own, near=tuple(range(own.num))))
    classes = dict(links.site_links)
    pairs = dict(links.pair_links)
    for site, kinds in of_site.items():
        # One kind of machine: the class of the site is widened as a whole.
        own_class = links.site_links.get((site, site))
        if len(kinds) == 1 and own_class is not None:
            (kind,) = kinds
            classes[site, site] = _widened(own_class, kind, kind)
    # Unlike machines of a site get links pair by pair.
    mixed = [node.name for node in nodes if len(of_site[node.site]) > 1]
    # Pairs that have links of their own keep these, widened by their own machines.
    for a, b in dict.fromkeys((*pairs, *permutations(mixed, 2))):
        here, there = machine_of(a), machine_of(b)
        # Only links between machines of one site go over several NICs side by side.
        if here != there and links.sites[a] == links.sites[b]:
            pairs[a, b] = _widened(links[a, b], nics.get(here), nics.get(there))
    return NodeLinks(links.sites, classes, pairs)


def _widened(link: Link, one: Nics | None, other: Nics | None) -> Link:
    """Return the path between two machines of one site."""
    # One pair of GPUs goes over one NIC at each end, however many there are.
    wide = replace(link, nic_bytes_per_s=link.bytes_per_s)
    if one is None or other is None:
        return link if one is other else wide
    total = min(one.total_bytes_per_s, other.total_bytes_per_s)
    # Lanes side by side: as many as the slower machine fills.
    num_lanes = total / min(one.bytes_per_s, other.bytes_per_s)
    return replace(wide, bytes_per_s=num_lanes * link.bytes_per_s)


def capacity_of(section: NodeSection, nics: Nics | None) -> float:
    """Return the bytes/s between a machine and all others: the uplink, at most the sum of the
    NICs."""
    return min(section.uplink or inf, inf if nics is None else nics.total_bytes_per_s)


def nics_below_links(
    links: LinksSection,
    nodes: Sequence[NodeSection],
    nics: Mapping[str, Nics],
    references: References,
) -> Iterator[Doubt]:
    """Find links inside sites that are faster than the NICs of any two machines there.

    A link that some machines are too slow for, and others are not, is what the network carries.

    Args:
        links: the file's.
        nodes: the file's machines.
        nics: by the name of the machine, for machines that describe several.
    """
    if not nics:
        return
    # Site -> the NICs of its machines; two of a kind stand for all of the kind.
    of_site: dict[str, list[Nics | None]] = {}
    for node in nodes:
        kinds, own = of_site.setdefault(node.site, []), nics.get(node.name)
        if kinds.count(own) < 2:
            kinds.append(own)
    # One link for all sites, or one by site.
    between, root = links.between_nodes, ("links", "between_nodes")
    classes = between.items() if isinstance(between, dict) else [(None, between)]
    for site, link in classes:
        found = [
            _carried(one, other)
            for own, kinds in of_site.items()
            for one, other in combinations(kinds, 2)
            if site in (None, own)
        ]
        if link is not None and found and max(found) < link.bandwidth:
            yield _doubt(root if site is None else (*root, site), link, max(found), references)
    # Measured pairs, but for those between sites, which are one path for all NICs.
    site_of = {node.name: node.site for node in nodes}
    for place, measured in enumerate(links.measured):
        a, b = measured.nodes
        most = _carried(nics.get(a), nics.get(b))
        if site_of[a] == site_of[b] and most < measured.bandwidth:
            yield _doubt(("links", "measured", place), measured, most, references)


def _carried(one: Nics | None, other: Nics | None) -> float:
    """Return the most that a link between two machines can be: what one pair of GPUs gets, or all
    GPUs where one machine has a single NIC for all."""
    if one is not None and other is not None:
        return min(one.bytes_per_s, other.bytes_per_s)
    known = one or other
    return inf if known is None else known.total_bytes_per_s


def _doubt(
    keypath: Sequence[str | int], link: LinkSection, most: float, references: References
) -> Doubt:
    said, carried = (format_bandwidth(speed) for speed in (link.bandwidth, most))
    return Doubt(
        references.place((*keypath, "bandwidth")),
        f"{said} is more than the `nics` of any two machines carry, {carried}, which counts",
        "a link is what one pair of GPUs sees, over one NIC at each end, and side by side NICs "
        f"multiply it: write {carried} here, or the right bandwidth into `nics`",
    )
