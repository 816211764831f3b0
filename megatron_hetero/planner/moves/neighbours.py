"""Every structure one move away from a given one.

A move is made in one replica, in all that are alike, and in all with like groups over unlike links.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import pairwise, zip_longest

from megatron_hetero.cluster.spec import Node
from megatron_hetero.planner.moves.divisions import divisions
from megatron_hetero.planner.problem import Chain, Problem, Unit, divides

Structure = tuple[Chain, ...]
Shape = Callable[[Chain], Hashable]
Scope = tuple[int, ...]
"""Replicas that change together."""


def neighbours(problem: Problem, structure: Structure, shape: Shape) -> Iterator[Structure]:
    """Yield all structures one move away; may repeat."""
    counts = problem.replica_counts()
    for moved in _moves(problem, structure, shape):
        if len(moved) in counts and all(problem.chain_is_allowed(chain) for chain in moved):
            yield moved


def _moves(problem: Problem, structure: Structure, shape: Shape) -> Iterator[Structure]:
    alike = _classes(structure, shape)
    like = problem.likeness.node
    wider = _classes(
        structure,
        lambda chain: tuple([(unit.form, *[like(n) for n, _ in unit.parts]) for unit in chain]),
    )
    idle = {
        node.name: list(indices) for node in problem.nodes for indices in (problem.gpus[node.name],)
    }
    for chain in structure:
        for unit in chain:
            for node, indices in unit.parts:
                for index in indices:
                    idle[node].remove(index)
    for members in wider:
        same = next(of for of in alike if members[0] in of)
        scopes = list(dict.fromkeys([members[:1], same, members]))
        yield from _inside(problem, structure, scopes)
        yield from _insert(problem, structure, scopes, idle)
        yield from _split_replica(problem, structure, members)
    for i, members in enumerate(wider):
        for others in wider[i:]:
            yield from _between(problem, structure, members, others)
    yield from _new_replicas(problem, structure, idle)
    if divides(structure):
        yield from divisions(problem, structure, alike, idle)


def _classes(structure: Structure, likeness: Shape) -> list[Scope]:
    """Return the replicas that are alike, for each kind."""
    classes: dict[Hashable, list[int]] = {}
    for r, chain in enumerate(structure):
        classes.setdefault(likeness(chain), []).append(r)
    return list(map(tuple, classes.values()))


def _gaps(problem: Problem, chain: Chain) -> list[int]:
    """Return places between stages, and at both ends, that are not inside a run of equal groups; of
    those between groups that are alike over links that are alike, the first and the last."""
    like = problem.likeness
    firsts: dict[Hashable, int] = {}
    lasts: dict[Hashable, int] = {}
    for t, (one, other) in enumerate(pairwise(chain), 1):
        if not _equal(one, other):
            sides = like.node(one.node), one.form, like.node(other.node), other.form
            kind = *sides, like.hop(one.node, other.node)
            firsts.setdefault(kind, t)
            lasts[kind] = t
    return sorted({0, *firsts.values(), *lasts.values(), len(chain)})


def _ends(problem: Problem, chain: Chain) -> list[int]:
    """Return stages beside the places that `_gaps` returns."""
    gaps = _gaps(problem, chain)
    return sorted({*gaps[:-1], *[gap - 1 for gap in gaps[1:]]})


def _equal(one: Unit, other: Unit) -> bool:
    return (one.node, one.form) == (other.node, other.form) and not (one.beyond or other.beyond)


def _with(structure: Structure, changes: dict[int, Chain]) -> Structure:
    chains = [changes.get(r, chain) for r, chain in enumerate(structure)]
    return tuple([chain for chain in chains if chain])


def _scoped(
    structure: Structure, scopes: Sequence[Scope], change: Callable[[Chain], Chain | None]
) -> Iterator[Structure]:
    """Make the change in the replicas of each scope."""
    for scope in scopes:
        changes = {r: change(structure[r]) for r in scope}
        made = {r: chain for r, chain in changes.items() if chain is not None}
        if len(made) == len(changes):
            yield _with(structure, made)


def _inside(problem: Problem, structure: Structure, scopes: Sequence[Scope]) -> Iterator[Structure]:
    """Reorder, drop, split and join stages."""
    chain = structure[scopes[0][0]]
    ends, gaps = _ends(problem, chain), _gaps(problem, chain)
    for s in ends:

        def drop(c: Chain, s: int = s) -> Chain | None:
            return (*c[:s], *c[s + 1 :])

        yield from _scoped(structure, scopes, drop)
        for t in sorted({gap - (gap > s) for gap in gaps}):
            if t == s:
                continue

            def shift(c: Chain, s: int = s, t: int = t) -> Chain | None:
                rest = [*c[:s], *c[s + 1 :]]
                rest.insert(t, c[s])
                return tuple(rest)

            yield from _scoped(structure, scopes, shift)
        for t in ends:
            if t > s + 1:

                def swap(c: Chain, s: int = s, t: int = t) -> Chain | None:
                    made = list(c)
                    made[s], made[t] = made[t], made[s]
                    return tuple(made)

                yield from _scoped(structure, scopes, swap)
        widths = () if chain[s].context_parallel > 1 else problem.widths[chain[s].node]
        for width in widths:
            other = chain[s].width - width
            if other > 0 and other in widths:

                def cut(c: Chain, s: int = s, width: int = width) -> Chain | None:
                    unit = c[s]
                    left = Unit(unit.node, unit.indices[:width])
                    right = Unit(unit.node, unit.indices[width:])
                    return (*c[:s], left, right, *c[s + 1 :])

                yield from _scoped(structure, scopes, cut)
        for t in ends:
            if (
                t > s
                and chain[t].context_parallel == 1
                and chain[t].node == chain[s].node
                and chain[t].width + chain[s].width in widths
            ):

                def join(c: Chain, s: int = s, t: int = t) -> Chain | None:
                    if c[s].node != c[t].node:
                        return None
                    one = Unit(c[s].node, tuple(sorted(c[s].indices + c[t].indices)))
                    return (*c[:s], one, *c[s + 1 : t], *c[t + 1 :])

                yield from _scoped(structure, scopes, join)
    yield from _scoped(structure, scopes, lambda c: c[::-1])


def _insert(
    problem: Problem, structure: Structure, scopes: Sequence[Scope], idle: dict[str, list[int]]
) -> Iterator[Structure]:
    """Yield idle GPUs as a stage more, or beside a stage of the same node."""
    chain = structure[scopes[0][0]]
    gaps, hop = _gaps(problem, chain), problem.likeness.hop
    tried: set[Hashable] = set()
    for node in problem.nodes:
        for width in problem.widths[node.name]:
            if width > len(idle[node.name]):
                break
            for t in gaps:
                near = tuple([hop(unit.node, node.name) for unit in chain[max(t - 1, 0) : t + 1]])
                key = _idle_image(problem, node, idle), width, t, near
                if key in tried:
                    continue
                tried.add(key)
                for scope in scopes:
                    units = _taken(problem, idle, node, width, len(scope))
                    if units is not None:
                        changes = {}
                        for r, unit in zip(scope, units, strict=True):
                            changes[r] = (*structure[r][:t], unit, *structure[r][t:])
                        yield _with(structure, changes)
        free = idle[node.name]
        for s, unit in enumerate(chain):
            if unit.node == node.name and unit.context_parallel == 1:
                for width in problem.widths[node.name]:
                    if 0 < width - unit.width <= len(free):
                        more = tuple(sorted(unit.indices + tuple(free[: width - unit.width])))
                        wide = Unit(node.name, more)
                        yield _with(structure, {scopes[0][0]: (*chain[:s], wide, *chain[s + 1 :])})


def _taken(
    problem: Problem, idle: dict[str, list[int]], node: Node, width: int, number: int
) -> list[Unit] | None:
    """Return idle groups, of this node first and then of nodes like it; None if there are too
    few."""
    like = problem.likeness.node
    alike = [n for n in problem.nodes if n.site == node.site and like(n.name) == like(node.name)]
    units: list[Unit] = []
    for one in [node, *[n for n in alike if n is not node]]:
        free = idle[one.name]
        for start in range(0, len(free) - width + 1, width):
            if len(units) == number:
                break
            units.append(Unit(one.name, tuple(free[start : start + width])))
    return units if len(units) == number else None


def _new_replicas(
    problem: Problem, structure: Structure, idle: dict[str, list[int]]
) -> Iterator[Structure]:
    firsts = {_idle_image(problem, node, idle): node for node in reversed(problem.nodes)}
    for node in reversed(firsts.values()):
        free = idle[node.name]
        for width in problem.widths[node.name]:
            if width > len(free):
                break
            yield (*structure, (Unit(node.name, tuple(free[:width])),))


def _idle_image(problem: Problem, node: Node, idle: Mapping[str, list[int]]) -> Hashable:
    """Return equal for like nodes of a site with as many idle GPUs."""
    return problem.likeness.node(node.name), node.site, len(idle[node.name])


def _split_replica(
    problem: Problem, structure: Structure, members: Sequence[int]
) -> Iterator[Structure]:
    """Split a replica into two: at any place, or every second stage to the other."""
    chain = structure[members[0]]
    middle = len(chain) // 2
    parts = [
        (chain[:t], chain[t:])
        for t in sorted({*_gaps(problem, chain), middle})
        if 0 < t < len(chain)
    ]
    if len(chain) > 2:
        parts.append((chain[::2], chain[1::2]))
    for one, other in parts:
        yield (*_with(structure, {members[0]: one}), other)
    if len(members) > 1 and len(chain) > 1:
        half = len(chain) // 2
        rest = _with(structure, dict.fromkeys(members, ()))
        chains = [structure[r] for r in members]
        yield (*rest, *[part for c in chains for part in (c[:half], c[half:])])
        yield (*rest, *[part for c in chains for part in (c[::2], c[1::2])])


def _between(
    problem: Problem, structure: Structure, members: Sequence[int], others: Sequence[int]
) -> Iterator[Structure]:
    """Exchange groups of two replicas, move one over, join two replicas."""
    same = members is others
    if same and len(members) < 2:
        return
    r, q = members[0], (members[1] if same else others[0])
    pairs = [(r, q)]
    everyone: list[tuple[int, int]] = []
    if same:
        everyone = list(zip(members[::2], members[1::2], strict=False))
    elif len(members) == len(others):
        everyone = list(zip(members, others, strict=True))
    scopes = [pairs] if len(everyone) < 2 else [pairs, everyone]
    one, other = structure[r], structure[q]
    of_one, of_other = _ends(problem, one), _ends(problem, other)
    for s in of_one:
        for t in of_other:
            a, b = one[s], other[t]
            if _equal(a, b):
                continue
            for scope in scopes:
                changes = {}
                for x, y in scope:
                    left, right = structure[x], structure[y]
                    changes[x] = (*left[:s], right[t], *left[s + 1 :])
                    changes[y] = (*right[:t], left[s], *right[t + 1 :])
                yield _with(structure, changes)
    for giver_first in (True, False):
        gaps = _gaps(problem, other if giver_first else one)
        for s in of_one if giver_first else of_other:
            for t in gaps:
                for scope in scopes:
                    changes = {}
                    for x, y in scope:
                        x, y = (x, y) if giver_first else (y, x)
                        left, right = structure[x], structure[y]
                        changes[x] = (*left[:s], *left[s + 1 :])
                        changes[y] = (*right[:t], left[s], *right[t:])
                    yield _with(structure, changes)
    for scope in scopes:
        for order in (1, -1):
            changes = {}
            for x, y in scope:
                changes[x] = (
                    structure[x] + structure[y] if order == 1 else structure[y] + structure[x]
                )
                changes[y] = ()
            yield _with(structure, changes)
        woven: dict[int, Chain] = {}
        for x, y in scope:
            pairs_of = zip_longest(structure[x], structure[y])
            woven[x] = tuple([unit for pair in pairs_of for unit in pair if unit is not None])
            woven[y] = ()
        yield _with(structure, woven)
