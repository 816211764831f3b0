"""Made-up trees of links, for the bench and the tests of exchanges."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

from megatron_hetero.cluster.node_links import Incast, Link
from tools.referees.gentree.tree import FREE, Branch, DeviceTerms, LinkTree

_FASTEST = 4e9
_NARROWER = 8.0
"""Uplinks of a level are so much narrower than those below."""


def random_tree(random: Random, most_holders: int = 64) -> LinkTree:
    """Make a tree of up to four levels, of unlike depths, children and uplinks, some of which bear
    only a few senders."""
    return LinkTree(replace(_branch(random, random.randint(2, most_holders), 0, [0]), up=None))


def _branch(random: Random, num_holders: int, depth: int, made: list[int]) -> Branch:
    made[0] += 1
    name = f"b{made[0]}"
    if num_holders == 1:
        terms = DeviceTerms(0.0, random.choice((0.0, 1e-11, 1e-10)))
        return Branch(name, (), _link(random, 0), None, terms)
    num = random.randint(2, min(num_holders, random.choice((2, 3, 4, 8, 16, 64))))
    if depth >= 3:
        num = num_holders
    cuts = [0, *sorted(random.sample(range(1, num_holders), num - 1)), num_holders]
    children = tuple(
        _branch(random, stop - start, depth + 1, made) for start, stop in pairwise(cuts)
    )
    return Branch(name, children, _link(random, max(1, 3 - depth)))


def _link(random: Random, level: int) -> Link:
    speed = _FASTEST / _NARROWER**level
    if random.random() < 0.5:
        speed *= random.choice((0.25, 0.25, 0.5, 1.0, 2.5)) * 10 ** random.uniform(-1, 0)
    incast = None
    if random.random() < 0.3:
        incast = Incast(random.randint(1, 4), random.choice((0.1, 0.5, 1.0)))
    return Link(speed, 10 ** random.uniform(-6, -4) * 10**level, incast=incast)


def star(speeds: list[float], latency_s: float, incast: Incast | None = None) -> LinkTree:
    """Make devices on one switch, by the bandwidths of their uplinks."""
    leaves = [
        Branch(f"gpu{i}", (), Link(speed, latency_s / 2, incast=incast))
        for i, speed in enumerate(speeds)
    ]
    return LinkTree(Branch("switch", tuple(leaves)))


def two_levels(
    counts: list[int], inside: Link, uplinks: list[Link], device: DeviceTerms = FREE
) -> LinkTree:
    """Make nodes of so many devices, each with its uplink."""
    nodes = [
        Branch(
            f"node{i}",
            tuple(Branch(f"gpu{i}:{j}", (), inside, None, device) for j in range(count)),
            link,
        )
        for i, (count, link) in enumerate(zip(counts, uplinks, strict=True))
    ]
    return LinkTree(Branch("switch", tuple(nodes)))
