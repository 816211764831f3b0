"""Every structure reached from a given structure in a single move.

A move is made in one replica, in all that are alike, and in all with like groups over unlike links;
a move between two replicas in one pair, and in all pairs that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import combinations_with_replacement

from megatron_hetero.planner.moves.divisions import join_groups, regroup
from megatron_hetero.planner.moves.idle_groups import (
    Scope,
    TakesIdle,
    begin,
    idle_of,
    insert,
    widen,
)
from megatron_hetero.planner.moves.one_replica import cut, drop, join, shift, split
from megatron_hetero.planner.moves.places import Change, PairChange, ReplicaPlaces
from megatron_hetero.planner.moves.two_replicas import exchange, give
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Structure, divides

Shape = Callable[[Chain], Hashable]
IN_ONE: tuple[Callable[[ReplicaPlaces], Iterator[Change]], ...] = (
    drop,
    shift,
    cut,
    join,
    split,
)
"""Moves inside one replica."""
IN_TWO: tuple[Callable[[ReplicaPlaces, ReplicaPlaces], Iterator[PairChange]], ...] = (
    exchange,
    give,
)
"""Moves between two."""
WITH_IDLE: tuple[TakesIdle, ...] = (insert, widen)
"""Moves that bring idle GPUs into a replica; `begin` makes them one of their own."""
DIVIDED = (regroup, join_groups)
"""Further moves inside one replica, of structures with a stage that divides sequences."""


def neighbours(
    problem: Problem, structure: Structure, shape: Shape, *, divided: bool = False
) -> Iterator[Structure]:
    """Yield all structures one move away; may repeat.

    Args:
        problem: whose limits are kept.
        structure: to move from.
        shape: equal for replicas that are alike (`Completer.shape`).
        divided: only structures with a stage that divides sequences, whether this one has any or
            not.
    """
    counts = problem.replica_counts()
    # Most chains stay as they are, and are the same objects.
    known = {id(chain) for chain in structure if problem.chain_is_allowed(chain)}
    for moved in _moved(problem, structure, shape, divided):
        if (
            len(moved) in counts
            and all(id(chain) in known or problem.chain_is_allowed(chain) for chain in moved)
            and (not divided or divides(moved))
        ):
            yield moved


def _moved(
    problem: Problem, structure: Structure, shape: Shape, divided: bool
) -> Iterator[Structure]:
    of_one, of_two, with_idle = ((), (), ()) if divided else (IN_ONE, IN_TWO, WITH_IDLE)
    if divided or divides(structure):
        of_one += DIVIDED
    idle = idle_of(problem, structure)
    like = problem.likeness.node
    # Alike in links too: all of them are changed in one move.
    alike = _classes(structure, shape)
    # Alike in groups only: the links between them may differ.
    wider = _classes(
        structure,
        lambda chain: tuple([(unit.form, *[like(n) for n, _ in unit.parts]) for unit in chain]),
    )
    members = {scope: ReplicaPlaces(problem, structure[scope[0]]) for scope in wider}
    for scope, replica in members.items():
        same = next(of for of in alike if scope[0] in of)
        # In one replica, in all that are alike, and in all of the wider class.
        scopes = list(dict.fromkeys([scope[:1], same, scope]))
        for move in of_one:
            for change in move(replica):
                yield from _in_each(structure, scopes, change)
        for take in with_idle:
            yield from take(replica, structure, scopes, idle)
    # Each pair of classes once, a class with itself if it has two replicas.
    for one, other in combinations_with_replacement(wider, 2):
        if one is other and len(one) < 2:
            continue
        pairs = _pairs(one, other)
        for move_between in of_two:
            for pair_change in move_between(members[one], members[other]):
                yield from _in_pairs(structure, pairs, pair_change)
    if not divided:
        yield from begin(problem, structure, idle)


def _classes(structure: Structure, likeness: Shape) -> list[Scope]:
    """Return the replicas that are alike, for each kind."""
    classes: dict[Hashable, list[int]] = {}
    for r, chain in enumerate(structure):
        classes.setdefault(likeness(chain), []).append(r)
    return list(map(tuple, classes.values()))


def _pairs(one: Scope, other: Scope) -> list[list[tuple[int, int]]]:
    """Return which replicas change two by two: the first of both, and all where they pair up."""
    if one is other:
        every = list(zip(one[::2], one[1::2], strict=False))
    elif len(one) == len(other):
        every = list(zip(one, other, strict=True))
    else:
        every = [(one[0], other[0])]
    return [every[:1], every] if len(every) > 1 else [every]


def _in_each(structure: Structure, scopes: Sequence[Scope], change: Change) -> Iterator[Structure]:
    """Make the change in all replicas of each scope where it can be made in all."""
    for scope in scopes:
        made: dict[int, Structure] = {}
        for r in scope:
            chains = change(structure[r])
            if chains is None:
                break
            made[r] = chains
        else:
            yield _with(structure, made)


def _in_pairs(
    structure: Structure, scopes: Sequence[Sequence[tuple[int, int]]], change: PairChange
) -> Iterator[Structure]:
    """Make the change in all pairs of each scope where it can be made in all."""
    for scope in scopes:
        made: dict[int, Structure] = {}
        for r, q in scope:
            chains = change(structure[r], structure[q])
            if chains is None:
                break
            made[r], made[q] = chains[:1], chains[1:]
        else:
            yield _with(structure, made)


def _with(structure: Structure, made: dict[int, Structure]) -> Structure:
    chains = [chain for r, own in enumerate(structure) for chain in made.get(r, (own,))]
    return tuple([chain for chain in chains if chain])
