"""A round trip through all sites on which neighbours are near: the order of rings.

A ring of a collective visits sites, then nodes, one after the other: NCCL joins the nodes in the
order of the ranks, and a plan numbers its ranks in this order.  Its latency is the sum over all
hops, so a tour that goes to and fro between far sites costs seconds in each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from megatron_hetero.cluster.node_links import Link

_MAX_STARTS = 16
_PIECE_BYTES = 1 << 20
"""Message size that measures a hop of the tour: short, so that latency counts most."""


def site_tour(sites: Sequence[str], links: Mapping[tuple[str, str], Link]) -> tuple[str, ...]:
    """Order the sites: from each to the nearest one left, from the start with which the whole tour
    is shortest.

    Args:
        sites: names; equal ones count once, and their order does not.
        links: by (site, site); pairs without one count as far apart.

    >>> near, far = Link(1e9, 0.001), Link(1e9, 0.1)
    >>> links = {(a, b): near if abs(a - b) == 1 else far for a in range(4) for b in range(4)}
    >>> site_tour("0213", {(str(a), str(b)): link for (a, b), link in links.items()})
    ('0', '1', '2', '3')
    """
    # Sorted, so that the order of the file does not count.
    names = sorted(set(sites))
    if len(names) <= 3:  # all ways are one
        return tuple(names)
    # (site, site) -> seconds of a short message.
    seconds = {(a, b): _hop_s(links, a, b) for a in names for b in names if a != b}
    # Each start costs a tour of all sites, so only some are tried.
    tours = [_nearest(names, start, seconds) for start in names[:_MAX_STARTS]]
    return min(tours, key=lambda tour: (_length_s(tour, seconds), tour))


def _nearest(
    names: Sequence[str], start: str, seconds: Mapping[tuple[str, str], float]
) -> tuple[str, ...]:
    tour, left = [start], [name for name in names if name != start]
    while left:
        here = tour[-1]
        # Of equally near sites the first by name.
        tour.append(min(left, key=lambda name: (seconds[here, name], name)))
        left.remove(tour[-1])
    return tuple(tour)


def _length_s(tour: Sequence[str], seconds: Mapping[tuple[str, str], float]) -> float:
    return sum(seconds[pair] for pair in pairwise((*tour, tour[0])))


def _hop_s(links: Mapping[tuple[str, str], Link], a: str, b: str) -> float:
    """Return the seconds of the longer of the two directions."""
    there, back = links.get((a, b)), links.get((b, a))
    if there is None or back is None:
        return float("inf")
    return max(link.latency_s + _PIECE_BYTES / link.bytes_per_s for link in (there, back))
