"""Moves of the groups that divide the sequences of a stage (context parallelism).

A stage's GPUs become wider or narrower tensor-parallel groups; two stages, or two replicas stage by
stage, become one whose groups divide sequences; and the other way round.  They vary structures that
have such a stage already: `shapes.divided` brings the first ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from megatron_hetero.planner.problem import Chain, Problem, Unit, joined_units

Structure = tuple[Chain, ...]
Chains = tuple[Chain, ...]


def divisions(
    problem: Problem,
    structure: Structure,
    alike: Sequence[Sequence[int]],
    idle: Mapping[str, Sequence[int]],
) -> Iterator[Structure]:
    """Yield all structures one such move away; may repeat.

    Args:
        alike: numbers of replicas that are alike.
        idle: GPUs of each node that no unit has.
    """
    for members in alike:
        chain = structure[members[0]]
        scopes = [members[:1], members] if len(members) > 1 else [members]
        for change in _changes(problem, chain, idle):
            for scope in scopes:
                yield from _made(problem, structure, scope, change)
        yield from _replicas(problem, structure, members)


Change = Callable[[Chain], Chains | None]


def _made(
    problem: Problem, structure: Structure, scope: Sequence[int], change: Change
) -> Iterator[Structure]:
    found: dict[int, Chains] = {}
    for r in scope:
        chains = change(structure[r])
        if chains is None:
            return
        found[r] = chains
    made = [c for r, chain in enumerate(structure) for c in found.get(r, (chain,))]
    taken = [device for chain in made for unit in chain for device in unit.devices]
    if len(set(taken)) == len(taken) and all(
        problem.may_be_a_unit(unit) for chain in made for unit in chain
    ):
        yield tuple(made)


def _changes(problem: Problem, chain: Chain, idle: Mapping[str, Sequence[int]]) -> Iterator[Change]:
    """Yield what may be done to a replica: of each run of equal stages the first stands for all."""
    first = [s for s in range(len(chain)) if s == 0 or _shape(chain[s]) != _shape(chain[s - 1])]
    for s in first:
        num_gpus = len(chain[s].devices)
        for width in sorted({w for node, _ in chain[s].parts for w in problem.widths[node]}):
            if width != chain[s].width and num_gpus % width == 0:
                yield _regrouped(chain[s], width, every=False, place=s)
                yield _regrouped(chain[s], width, every=True, place=s)
        for t in range(s + 1, len(chain)):
            if chain[t].width == chain[s].width:
                yield _joined(s, t)
        if chain[s].context_parallel > 1:
            yield _split(s)
        for node, free in idle.items():
            if len(free) >= chain[s].width:
                more = Unit(node, tuple(free[: chain[s].width]))
                yield _widened(s, more)
    yield _halves


def _shape(unit: Unit) -> tuple[object, ...]:
    return unit.form, [node for node, _ in unit.parts]


def _regrouped(like: Unit, width: int, *, every: bool, place: int) -> Change:
    """Change the width of the groups of one stage, or of every stage of as many GPUs."""

    def change(chain: Chain) -> Chains | None:
        made = list(chain)
        for s, unit in enumerate(chain):
            if s == place or (every and len(unit.devices) == len(like.devices)):
                context = len(unit.devices) // width
                if context == 1 and unit.beyond:
                    return None
                made[s] = Unit(unit.node, unit.indices, context, unit.beyond)
        return (tuple(made),)

    return change


def _joined(s: int, t: int) -> Change:
    """Make two stages one, in the place of the first."""

    def change(chain: Chain) -> Chains | None:
        if t >= len(chain) or chain[s].width != chain[t].width:
            return None
        one = joined_units((chain[s], chain[t]))
        return ((*chain[:s], one, *chain[s + 1 : t], *chain[t + 1 :]),)

    return change


def _split(s: int) -> Change:
    """Make two stages of the halves of one."""

    def change(chain: Chain) -> Chains | None:
        parts = halves(chain[s])
        return None if parts is None else ((*chain[:s], *parts, *chain[s + 1 :]),)

    return change


def _widened(s: int, more: Unit) -> Change:
    """Give a stage an idle group."""

    def change(chain: Chain) -> Chains | None:
        if chain[s].width != more.width:
            return None
        return ((*chain[:s], joined_units((chain[s], more)), *chain[s + 1 :]),)

    return change


def _halves(chain: Chain) -> Chains | None:
    """Make two replicas of the halves of each stage."""
    pairs = [halves(unit) for unit in chain]
    found = [pair for pair in pairs if pair is not None]
    if len(found) < len(pairs):
        return None
    return tuple(one for one, _ in found), tuple(other for _, other in found)


def halves(unit: Unit) -> tuple[Unit, Unit] | None:
    """Return the first and the second half of a unit's groups; None of an odd number."""
    context, width = unit.context_parallel, unit.width
    if context % 2:
        return None
    groups = [
        Unit(node, indices[i : i + width])
        for node, indices in unit.parts
        for i in range(0, len(indices), width)
    ]
    return joined_units(groups[: context // 2]), joined_units(groups[context // 2 :])


def _replicas(
    problem: Problem, structure: Structure, members: Sequence[int]
) -> Iterator[Structure]:
    """Make one replica of two that are alike, stage by stage; and of every two."""
    pairs = list(zip(members[::2], members[1::2], strict=False))
    for scope in [pairs[:1], pairs] if len(pairs) > 1 else [pairs]:
        other_of = dict(scope)
        gone = set(other_of.values())
        made = []
        for r, chain in enumerate(structure):
            if r in other_of:
                pair = zip(chain, structure[other_of[r]], strict=True)
                made.append(tuple(joined_units(units) for units in pair))
            elif r not in gone:
                made.append(chain)
        if scope and all(problem.may_be_a_unit(unit) for chain in made for unit in chain):
            yield tuple(made)
