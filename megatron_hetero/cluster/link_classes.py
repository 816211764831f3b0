"""The links of a cluster by value, as arrays: few in the largest one, however many pairs it has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_hetero.cluster.node_links import Link, LinkSummary


@dataclass(frozen=True, eq=False)
class LinkClasses:
    """Distinct links of a cluster, and the class of each pair of nodes.

    Attributes:
        links: [class].
        bytes_per_s: [class], bandwidth.
        of_pairs: [node, node], the class; a node and itself have its inner link.
        node_number: positions of nodes in `of_pairs`, by name.
    """

    links: tuple[Link, ...]
    bytes_per_s: npt.NDArray[np.float64]
    of_pairs: npt.NDArray[np.int32]
    node_number: Mapping[str, int]


def classify_links(
    nodes: Sequence[Any], summary: LinkSummary, site_places: Mapping[str, int]
) -> LinkClasses:
    """Group the links of a cluster by value.

    Args:
        nodes: `Cluster.nodes`.
        summary: its links between nodes, by pairs of sites.
        site_places: numbers of all sites.
    """
    inner = [node.link for node in nodes]
    # Distinct links in a fixed order, so that equal clusters get equal numbers.
    links = tuple(dict.fromkeys([*summary.usual.values(), *summary.others.values(), *inner]))
    number = {link: i for i, link in enumerate(links)}
    # [site, site] -> class of the usual link.
    of_sites = np.zeros((len(site_places), len(site_places)), np.int32)
    for (here, there), link in summary.usual.items():
        of_sites[site_places[here], site_places[there]] = number[link]
    # [node] -> its site; indexing by it twice gives [node, node].
    own = np.array([site_places[node.site] for node in nodes])
    of_pairs = of_sites[np.ix_(own, own)]
    node_number = {node.name: i for i, node in enumerate(nodes)}
    # Pairs with a link of their own, over the usual ones.
    for (one, other), link in summary.others.items():
        of_pairs[node_number[one], node_number[other]] = number[link]
    # A node with itself: the link between its GPUs.
    np.fill_diagonal(of_pairs, [number[link] for link in inner])
    speeds = np.array([link.bytes_per_s for link in links])
    return LinkClasses(links, speeds, of_pairs, node_number)
