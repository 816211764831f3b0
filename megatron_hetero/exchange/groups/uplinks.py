"""Relative bandwidths of machines' uplinks, by which groups of machines own parts of gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd, inf

import numpy as np

from megatron_hetero.cluster.spec import Cluster

_SCALE = 1000
"""Number of the fastest machine: parts are as exact as that."""

Uplinks = tuple[tuple[int, ...], ...]


def relative_uplinks(cluster: Cluster, groups: Sequence[Sequence[str]]) -> Uplinks:
    """Return a number for each machine of some groups: those of one group stand to each other as
    their bandwidths, and add up to what the group exchanges with others.

    A machine exchanges at the rate of its fastest path to another of the groups.  A group does so
    at the rate of its machines together on their paths to other groups, or of the lines that lead
    from its sites to others.

    Returns:
        As `Plan.exchange_uplinks`; empty where machines of a group are alike, and groups too.
    """
    # Nodes of the machines, and the speed of every path between them.
    machines = [machine for group in groups for machine in group]
    nodes = [node for machine in machines for node in cluster.machines[machine]]
    place = {machine: i for i, machine in enumerate(machines)}
    group_of = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    at = np.array([place[node.machine] for node in nodes])
    classes = cluster.link_classes
    numbers = np.array([classes.node_number[node.name] for node in nodes])
    speeds = classes.bytes_per_s[classes.of_pairs[np.ix_(numbers, numbers)]]
    # [node, node]; a path inside a machine is no uplink, hence zero.
    paths = np.where(at[:, None] != at, np.minimum(speeds, speeds.T), 0.0)
    # Rate of each node to any other, and to each other group.
    fastest = np.minimum(paths.max(1), [node.uplink_bytes_per_s for node in nodes])
    to_groups = np.maximum.reduceat(paths, np.searchsorted(group_of[at], np.arange(len(groups))), 1)
    to_groups[group_of[at][:, None] == np.arange(len(groups))] = 0.0
    # The same by machine.
    own, crossing = np.zeros(len(machines)), np.zeros(len(machines))
    np.maximum.at(own, at, fastest)
    np.maximum.at(crossing, at, np.minimum(fastest, to_groups.sum(1)))

    # A group goes no faster than the lines out of its sites.
    sites: dict[str, dict[int, float]] = {}
    for machine, number in zip(machines, group_of.tolist(), strict=True):
        rates = sites.setdefault(cluster.machines[machine][0].site, {})
        rates[number] = rates.get(number, 0.0) + float(crossing[place[machine]])
    together = np.zeros(len(groups))
    for site, rates in sites.items():
        for number, rate in rates.items():
            if len(rates) == 1:  # else some paths to other groups stay in the site
                others = [other for other, at_other in sites.items() if list(at_other) != [number]]
                rate = min(rate, _line_bytes_per_s(cluster, site, others))
            together[number] += rate
    # Scale: machines within their group, groups by what they exchange.
    mean = (together / np.bincount(group_of))[group_of]
    own *= (together / np.bincount(group_of, own))[group_of]
    if np.allclose(own, mean) and np.allclose(together, together[0]):
        return ()
    # Small whole numbers, as plan.json has them.
    rounded = np.maximum(1, np.rint(_SCALE * own / own.max())).astype(int).tolist()
    common = gcd(*rounded)
    return tuple(tuple(rounded[place[machine]] // common for machine in g) for g in groups)


def _line_bytes_per_s(cluster: Cluster, site: str, others: Iterable[str]) -> float:
    """Return the bandwidth of the lines shared by all paths from a site to `others`, or by all
    paths back."""
    # Lines shared one way and lines shared back may differ.
    found = inf
    for pairs in ([(site, other) for other in others], [(other, site) for other in others]):
        shared = set.intersection(*(set(cluster.site_lines.get(pair, ())) for pair in pairs))
        found = min([found, *(line.bytes_per_s for line in shared)])
    return found
