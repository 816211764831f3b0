"""Moves inside one replica: stages reordered, dropped, split and joined; the replica split.

Each move yields its changes; `neighbours` makes them in one replica and in all that are alike.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.planner.moves.places import Change, ReplicaPlaces
from megatron_hetero.planner.units import Chain, Structure, Unit


def drop(replica: ReplicaPlaces) -> Iterator[Change]:
    """Leave a stage out; its GPUs are idle then."""
    for s in replica.ends:

        def change(chain: Chain, s: int = s) -> Structure:
            return ((*chain[:s], *chain[s + 1 :]),)

        yield change


def shift(replica: ReplicaPlaces) -> Iterator[Change]:
    """Put a stage elsewhere in the pipeline."""
    for s in replica.ends:
        for t in sorted({gap - (gap > s) for gap in replica.gaps} - {s}):

            def change(chain: Chain, s: int = s, t: int = t) -> Structure:
                rest = [*chain[:s], *chain[s + 1 :]]
                rest.insert(t, chain[s])
                return (tuple(rest),)

            yield change


def cut(replica: ReplicaPlaces) -> Iterator[Change]:
    """Make two narrower stages of one."""
    for s in replica.ends:
        unit = replica.chain[s]
        widths = replica.problem.widths[unit.node] if unit.is_plain else ()
        for width in widths:
            if unit.width - width in widths:

                def change(chain: Chain, s: int = s, width: int = width) -> Structure:
                    unit = chain[s]
                    left = Unit(unit.node, unit.indices[:width])
                    right = Unit(unit.node, unit.indices[width:])
                    return ((*chain[:s], left, right, *chain[s + 1 :]),)

                yield change


def join(replica: ReplicaPlaces) -> Iterator[Change]:
    """Join two stages on one node into a wider stage."""
    chain, widths = replica.chain, replica.problem.widths
    for s in replica.ends:
        for t in replica.ends:
            one, other = chain[s], chain[t]
            if (
                t > s
                and one.node == other.node
                and one.is_plain
                and other.is_plain
                and one.width + other.width in widths[one.node]
            ):

                def change(chain: Chain, s: int = s, t: int = t) -> Structure | None:
                    one, other = chain[s], chain[t]
                    if one.node != other.node:
                        return None
                    both = Unit(one.node, tuple(sorted(one.indices + other.indices)))
                    return ((*chain[:s], both, *chain[s + 1 : t], *chain[t + 1 :]),)

                yield change


def split(replica: ReplicaPlaces) -> Iterator[Change]:
    """Make two replicas of one: cut at a place, or with every second stage in the other."""
    depth = len(replica.chain)
    for t in sorted({*replica.gaps, depth // 2} - {0, depth}):

        def change(chain: Chain, t: int = t) -> Structure:
            return chain[:t], chain[t:]

        yield change
    if depth > 2:
        yield lambda chain: (chain[::2], chain[1::2])
