"""Moves between two replicas: stages exchanged or given away.

Each move yields its changes; `neighbours` makes them in two replicas and in all pairs that are
alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from megatron_hetero.planner.moves.places import PairChange, ReplicaPlaces, are_equal
from megatron_hetero.planner.units import Chain, Structure


def exchange(one: ReplicaPlaces, other: ReplicaPlaces) -> Iterator[PairChange]:
    """Exchange a stage of one replica for a stage of the second."""
    for s in one.ends:
        for t in other.ends:
            if not are_equal(one.chain[s], other.chain[t]):

                def change(left: Chain, right: Chain, s: int = s, t: int = t) -> Structure:
                    return (
                        (*left[:s], right[t], *left[s + 1 :]),
                        (*right[:t], left[s], *right[t + 1 :]),
                    )

                yield change


def give(one: ReplicaPlaces, other: ReplicaPlaces) -> Iterator[PairChange]:
    """Move a stage from one replica into the second, either way."""
    for s in one.ends:
        for t in other.gaps:
            yield partial(_given, s=s, t=t)
    for s in other.ends:
        for t in one.gaps:
            yield partial(_taken, s=s, t=t)


def _given(giver: Chain, taker: Chain, s: int, t: int) -> Structure:
    return (*giver[:s], *giver[s + 1 :]), (*taker[:t], giver[s], *taker[t:])


def _taken(taker: Chain, giver: Chain, s: int, t: int) -> Structure:
    return _given(giver, taker, s, t)
