"""Every structure one move away from a given one.

A move is made in one replica, or in all replicas that are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, groupby, zip_longest

from megatron_hetero.cluster.spec import Node
from megatron_hetero.planner.moves.divisions import divisions
from megatron_hetero.planner.problem import Chain, Problem, Unit, divides

Structure = tuple[Chain, ...]
Shape = Callable[[Chain], Hashable]


def neighbours(problem: Problem, structure: Structure, shape: Shape) -> Iterator[Structure]:
    """Yield all structures one move away; may repeat."""
    counts = problem.replica_counts()
    for moved in _moves(problem, structure, shape):
        if len(moved) in counts and all(problem.chain_is_allowed(chain) for chain in moved):
            yield moved


def like_exchanges(structure: Structure, kind_of: Mapping[str, int]) -> Iterator[Structure]:
    """Yield the structure after each exchange of two like groups on different nodes.

    Args:
        kind_of: by node; groups of one kind and form are alike.
    """
    places: dict[tuple[int, tuple[int, ...]], list[tuple[int, int]]] = {}
    for r, chain in enumerate(structure):
        for s, unit in enumerate(chain):
            if not unit.beyond:
                places.setdefault((kind_of[unit.node], unit.form), []).append((r, s))
    for alike in places.values():
        for (r, s), (q, t) in combinations(alike, 2):
            one, other = structure[r][s], structure[q][t]
            if one.node != other.node:
                chains = [list(chain) for chain in structure]
                chains[r][s], chains[q][t] = other, one
                yield tuple([tuple(chain) for chain in chains])


def _moves(problem: Problem, structure: Structure, shape: Shape) -> Iterator[Structure]:
    alike = _classes(structure, shape)
    idle = {
        node.name: list(indices) for node in problem.nodes for indices in (problem.gpus[node.name],)
    }
    for chain in structure:
        for unit in chain:
            for node, indices in unit.parts:
                for index in indices:
                    idle[node].remove(index)
    kinds: list[Iterator[Structure]] = []
    for i, members in enumerate(alike):
        kinds += [
            _redealt(problem, structure, members),
            _split_replica(structure, members),
            _inside(problem, structure, members),
            _insert(problem, structure, members, idle),
        ]
        kinds += [_between(structure, members, others) for others in alike[i:]]
    kinds.append(_new_replicas(problem, structure, idle))
    if divides(structure):
        kinds.append(divisions(problem, structure, alike, idle))
    # In turn: where there are too many to look at all, no kind of move goes without.
    for moves in zip_longest(*kinds):
        yield from [moved for moved in moves if moved is not None]


def _classes(structure: Structure, shape: Shape) -> list[list[int]]:
    """Return the numbers of replicas that are alike, together."""
    classes: dict[Hashable, list[int]] = {}
    for r, chain in enumerate(structure):
        classes.setdefault(shape(chain), []).append(r)
    return list(classes.values())


def _gaps(chain: Chain) -> list[int]:
    """Return places between stages, and at both ends, that are not inside a run of equal groups."""
    return [0, *[t for t in range(1, len(chain)) if not _equal(chain[t - 1], chain[t])], len(chain)]


def _ends(chain: Chain) -> list[int]:
    """Return stages at either end of a run of equal groups."""
    gaps = _gaps(chain)
    return sorted({*gaps[:-1], *[gap - 1 for gap in gaps[1:]]})


def _equal(one: Unit, other: Unit) -> bool:
    return (one.node, one.form) == (other.node, other.form) and not (one.beyond or other.beyond)


def _with(structure: Structure, changes: dict[int, Chain]) -> Structure:
    chains = [changes.get(r, chain) for r, chain in enumerate(structure)]
    return tuple([chain for chain in chains if chain])


def _scoped(
    structure: Structure, members: Sequence[int], change: Callable[[Chain], Chain | None]
) -> Iterator[Structure]:
    """Make the change in one of them, and in all."""
    first = change(structure[members[0]])
    if first is None:
        return
    yield _with(structure, {members[0]: first})
    if len(members) > 1:
        changes = {r: change(structure[r]) for r in members}
        if all(chain is not None for chain in changes.values()):
            yield _with(structure, {r: chain for r, chain in changes.items() if chain is not None})


def _inside(problem: Problem, structure: Structure, members: Sequence[int]) -> Iterator[Structure]:
    """Reorder, drop, split and join stages."""
    chain = structure[members[0]]
    ends, gaps = _ends(chain), _gaps(chain)
    for s in ends:

        def drop(c: Chain, s: int = s) -> Chain | None:
            return (*c[:s], *c[s + 1 :])

        yield from _scoped(structure, members, drop)
        for t in sorted({gap - (gap > s) for gap in gaps}):
            if t == s:
                continue

            def shift(c: Chain, s: int = s, t: int = t) -> Chain | None:
                rest = [*c[:s], *c[s + 1 :]]
                rest.insert(t, c[s])
                return tuple(rest)

            yield from _scoped(structure, members, shift)
        for t in ends:
            if t > s + 1:

                def swap(c: Chain, s: int = s, t: int = t) -> Chain | None:
                    made = list(c)
                    made[s], made[t] = made[t], made[s]
                    return tuple(made)

                yield from _scoped(structure, members, swap)
        widths = () if chain[s].context_parallel > 1 else problem.widths[chain[s].node]
        for width in widths:
            other = chain[s].width - width
            if other > 0 and other in widths:

                def cut(c: Chain, s: int = s, width: int = width) -> Chain | None:
                    unit = c[s]
                    left = Unit(unit.node, unit.indices[:width])
                    right = Unit(unit.node, unit.indices[width:])
                    return (*c[:s], left, right, *c[s + 1 :])

                yield from _scoped(structure, members, cut)
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

                yield from _scoped(structure, members, join)
    yield from _scoped(structure, members, lambda c: c[::-1])


def _insert(
    problem: Problem, structure: Structure, members: Sequence[int], idle: dict[str, list[int]]
) -> Iterator[Structure]:
    """Yield idle GPUs as a stage more, or beside a stage of the same node."""
    chain = structure[members[0]]
    everyone = [members] if len(members) > 1 else []
    for node in problem.nodes:
        for width in problem.widths[node.name]:
            if width > len(idle[node.name]):
                break
            for t in _gaps(chain):
                for scope in [members[:1], *everyone]:
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
                        yield _with(structure, {members[0]: (*chain[:s], wide, *chain[s + 1 :])})


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
    for node in problem.nodes:
        free = idle[node.name]
        for width in problem.widths[node.name]:
            if width > len(free):
                break
            yield (*structure, (Unit(node.name, tuple(free[:width])),))


def _split_replica(structure: Structure, members: Sequence[int]) -> Iterator[Structure]:
    """Split a replica into two: at any place, or every second stage to the other."""
    chain = structure[members[0]]
    middle = len(chain) // 2
    parts = [(chain[:t], chain[t:]) for t in sorted({*_gaps(chain), middle}) if 0 < t < len(chain)]
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


def _redealt(problem: Problem, structure: Structure, members: Sequence[int]) -> Iterator[Structure]:
    """Deal the groups of replicas that are alike among them anew: side by side, or one of each
    replica on a node, so that gradients stay there."""
    if len(members) > 1:
        yield _with(structure, _dealt(problem, structure, members, is_side_by_side=True))
        yield _with(structure, _dealt(problem, structure, members, is_side_by_side=False))


def side_by_side(problem: Problem, structure: Structure, shape: Shape) -> Structure:
    """Return the structure with the groups of each replica side by side, on as few nodes as they
    fill, so that few of its hops leave a node; itself where replicas are not alike."""
    changes: dict[int, Chain] = {}
    for members in _classes(structure, shape):
        if len(members) > 1:
            changes |= _dealt(problem, structure, members, is_side_by_side=True)
    return _with(structure, changes)


def _dealt(
    problem: Problem, structure: Structure, members: Sequence[int], *, is_side_by_side: bool
) -> dict[int, Chain]:
    """Deal the groups of each run of like groups anew: two replicas of four groups on nodes of
    four become ``aaaa bbbb`` or ``abab abab``."""
    place = {node.name: number for number, node in enumerate(problem.nodes)}
    like, chain = problem.likeness.node, structure[members[0]]
    runs = [
        [s for s, _ in run]
        for _, run in groupby(enumerate(chain), lambda pair: (like(pair[1].node), pair[1].form))
    ]
    dealt = {r: list(structure[r]) for r in members}
    for run in runs:
        units = sorted(
            [structure[r][s] for r in members for s in run],
            key=lambda unit: (place[unit.node], unit.indices),
        )
        for number, r in enumerate(members):
            own = units[number * len(run) :] if is_side_by_side else units[number :: len(members)]
            dealt[r][run[0] : run[-1] + 1] = own[: len(run)]
    return {r: tuple(made) for r, made in dealt.items()}


def _between(
    structure: Structure, members: Sequence[int], others: Sequence[int]
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
    for s in _ends(one):
        for t in _ends(other):
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
        givers = one if giver_first else other
        takers = other if giver_first else one
        for s in _ends(givers):
            for t in _gaps(takers):
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
