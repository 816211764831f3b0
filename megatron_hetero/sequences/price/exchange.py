"""Seconds for what travels between the members of a group, a byte of every token."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.lines import line_seconds


def all_to_all_s(cluster: Cluster, devices: Sequence[Device]) -> tuple[float, float]:
    """Return the seconds that a byte of every token takes in an all-to-all among equal ranks, and
    the latency: each rank sends 1/n of its 1/n of the tokens to each other one."""
    count = len(devices)
    # The part of a byte of every token that one rank sends to one other.
    part = 1 / count**2
    between: dict[tuple[str, str], float] = {}
    inside: dict[str, float] = {}
    latency_s = 0.0
    for a in devices:
        # Inside a node a rank's own link limits what it sends; between nodes all pairs share the
        # path.
        for b in devices:
            if a == b:
                continue
            latency_s = max(latency_s, cluster.link(a, b).latency_s)
            if a.node == b.node:
                inside[a.name] = inside.get(a.name, 0.0) + part / cluster.link(a, b).bytes_per_s
            else:
                pair = (a.node, b.node)
                between[pair] = between.get(pair, 0.0) + part
    return max([*inside.values(), _between_nodes(cluster, between)], default=0.0), latency_s


def into_domains_s(
    cluster: Cluster, devices: Sequence[Device], division: Sequence[Sequence[int]]
) -> tuple[list[float], float]:
    """Return the seconds for each domain to receive a byte of every foreign token once, and the
    latency of a round.

    From a node each byte comes once into a domain, whose members receive 1/width of it each.
    """
    if len(division) == 1:
        return [0.0], 0.0
    found, latency_s = [], 0.0
    for members in division:
        own = [devices[i] for i in members]
        others = [d for d in devices if d not in own]
        # Ranks of a domain are on one node, or the division has one domain only.
        here = own[0].node
        # The part of the foreign tokens that comes from the own node, spread over the domain's
        # ranks.
        inside = [d for d in others if d.node == here]
        seconds = len(inside) / len(others) / len(own) / cluster.node_by_name[here].link.bytes_per_s
        between: dict[tuple[str, str], float] = {}
        for d in others:
            latency_s = max(latency_s, cluster.link(d, own[0]).latency_s)
            if d.node != here:
                pair = (d.node, here)
                # A byte of every foreign token: each rank outside brings its part.
                between[pair] = between.get(pair, 0.0) + 1 / len(others)
        # In a ring a node hands on to the next what all of its domains need.
        found.append(max(seconds, _between_nodes(cluster, between)))
    return found, latency_s


def _between_nodes(cluster: Cluster, carried: dict[tuple[str, str], float]) -> float:
    """Return the seconds of bytes between nodes: on their paths, and on lines that these share."""
    paths = [size / cluster.node_links[pair].bytes_per_s for pair, size in sorted(carried.items())]
    return max([*paths, *line_seconds(cluster, sorted(carried.items())).values()], default=0.0)
