"""Regions: sites that are near to each other, beside sites that are far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, product

from megatron_hetero.cluster.spec import Cluster

_PIECE_BYTES = 1 << 20
"""Message size by which links are near or far."""
_ALIKE = 1.5
"""Ratio of times below which two links are of the same kind."""

_Region = list[str]


def regions(cluster: Cluster, sites: Sequence[str]) -> list[_Region]:
    """Return the regions of two sites or more, each as its sites in the order given.

    Sites joined by links of the nearest kind make a region, near regions a larger one, and so on;
    the answer is the last step before all sites are one.
    """
    usual = cluster.link_summary.usual
    seconds = {}
    for a, b in product(sites, repeat=2):
        # Links may be slower in one direction, and the slower direction decides.
        if a != b:
            links = [usual[a, b], usual[b, a]]
            seconds[a, b] = max(k.latency_s + _PIECE_BYTES / k.bytes_per_s for k in links)
    in_order = dict.fromkeys(node.site for node in cluster.nodes)
    found = [[site] for site in in_order if site in sites]
    # Each pass joins at least the two nearest, so that the loop ends.
    while len(joined := _joined(found, seconds)) > 1:
        found = joined
    return [sorted(region, key=sites.index) for region in found]


def _joined(
    parts: Sequence[_Region], seconds: Mapping[tuple[str, str], float]
) -> list[_Region]:
    """Join the parts with links about as fast as the fastest between two of them."""
    between = {
        (i, j): min(seconds[a, b] for a, b in product(parts[i], parts[j]))
        for i, j in combinations(range(len(parts)), 2)
    }
    near_s = _ALIKE * min(between.values())
    # Label propagation: each fast link gives both ends' parts one number.
    label = list(range(len(parts)))
    for (i, j), pair_s in between.items():
        if pair_s <= near_s and label[i] != label[j]:
            label = [label[i] if number == label[j] else number for number in label]
    return [
        [site for part, own in zip(parts, label, strict=True) if own == number for site in part]
        for number in dict.fromkeys(label)
    ]
