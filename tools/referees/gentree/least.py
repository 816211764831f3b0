"""What no all-reduce on a tree of links is faster than, by the bytes that links carry.

Whatever lies below an uplink has contributions that the rest needs, for every element, and needs
theirs: the uplink carries the buffer once in each direction.  What a switch joins are parties that
must all learn what all have, for every element; by one-way messages n parties need 2 n - 2 of them
(Harary and Schwenk 1974), each over the way up of one party and the way down of another.
"""

from __future__ import annotations

from tools.referees.gentree.tree import LinkTree


def least_all_reduce_s(tree: LinkTree, num_bytes: float) -> float:
    """Bound the seconds of an all-reduce of `num_bytes` from below, without latency and adding."""
    speed = tree.bytes_per_s
    if tree.num_holders == 1:
        return 0.0
    least_s = 0.0
    for number, children in tree.inner():
        outward = [float(speed[2 * child]) for child in children]
        inward = [float(speed[2 * child + 1]) for child in children]
        if number and len(tree.holders_below(number)) < tree.num_holders:
            outward.append(float(speed[2 * number + 1]))
            inward.append(float(speed[2 * number]))
        if len(outward) < 2:
            continue
        least_s = max(least_s, 1 / min(outward), 1 / min(inward))
        messages = 2 * len(outward) - 2
        least_s = max(least_s, messages / sum(outward), messages / sum(inward))
    return least_s * num_bytes
