"""Moves of the groups that divide the sequences of a stage (context parallelism).

A stage's GPUs become wider or narrower tensor-parallel groups; two stages, or two replicas stage by
stage, become one whose groups divide sequences; and the other way round.  They vary structures that
have such a stage already: `seeds.divided` brings the first ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.planner.moves.idle_groups import Idle, Scope, with_stage
from megatron_hetero.planner.moves.places import Change, PairChange, ReplicaPlaces
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Structure, Unit, joined_units


def regroup(replica: ReplicaPlaces) -> Iterator[Change]:
    """Change the width of the groups of a stage, or of every stage of as many GPUs."""
    problem = replica.problem
    for s in _firsts(replica.chain):
        unit = replica.chain[s]
        for width in sorted({w for node, _ in unit.parts for w in problem.widths[node]}):
            if width != unit.width and len(unit.devices) % width == 0:
                for every in (False, True):

                    def change(
                        chain: Chain, s: int = s, width: int = width, every: bool = every
                    ) -> Structure | None:
                        num_gpus = len(chain[s].devices)
                        made = [
                            _of_width(unit, width)
                            if t == s or (every and len(unit.devices) == num_gpus)
                            else unit
                            for t, unit in enumerate(chain)
                        ]
                        return _allowed(problem, made)

                    yield change


def _of_width(unit: Unit, width: int) -> Unit:
    return Unit(unit.node, unit.indices, len(unit.devices) // width, unit.beyond)


def join_groups(replica: ReplicaPlaces) -> Iterator[Change]:
    """Join two stages into a stage that divides sequences, in the place of the first."""
    for s in _firsts(replica.chain):
        for t in range(s + 1, len(replica.chain)):
            if replica.chain[t].width == replica.chain[s].width:

                def change(chain: Chain, s: int = s, t: int = t) -> Structure | None:
                    one = joined_units((chain[s], chain[t]))
                    return _allowed(
                        replica.problem, [*chain[:s], one, *chain[s + 1 : t], *chain[t + 1 :]]
                    )

                yield change


def split_groups(replica: ReplicaPlaces) -> Iterator[Change]:
    """Split a stage that divides sequences into two stages of half the GPUs."""
    for s in _firsts(replica.chain):
        if replica.chain[s].context_parallel > 1:

            def change(chain: Chain, s: int = s) -> Structure | None:
                parts = halves(chain[s])
                if parts is None:
                    return None
                return _allowed(replica.problem, [*chain[:s], *parts, *chain[s + 1 :]])

            yield change


def halve(replica: ReplicaPlaces) -> Iterator[Change]:
    """Make two replicas of the halves of each stage."""

    def change(chain: Chain) -> Structure | None:
        pairs = [halves(unit) for unit in chain]
        found = [pair for pair in pairs if pair is not None]
        if len(found) < len(pairs):
            return None
        one, other = zip(*found, strict=True)
        return _allowed(replica.problem, one, other)

    yield change


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


def pair(one: ReplicaPlaces, other: ReplicaPlaces) -> Iterator[PairChange]:
    """Join two replicas stage by stage; the groups of each stage then divide sequences."""

    def change(left: Chain, right: Chain) -> Structure | None:
        # Stage by stage, the groups of both replicas have to be alike in width.
        if [unit.width for unit in left] != [unit.width for unit in right]:
            return None
        made = [joined_units(units) for units in zip(left, right, strict=True)]
        return _allowed(one.problem, made)

    yield change


def add_group(
    replica: ReplicaPlaces, structure: Structure, scopes: Sequence[Scope], idle: Idle
) -> Iterator[Structure]:
    """Give a stage one more, idle group."""
    for s in _firsts(replica.chain):
        unit = replica.chain[s]
        for node, free in idle.items():
            if len(free) >= unit.width:
                more = joined_units((unit, Unit(node, free[: unit.width])))
                if replica.problem.may_be_a_unit(more):
                    yield with_stage(structure, scopes[0][0], s, more)


def _firsts(chain: Chain) -> list[int]:
    """Return stages: the first of each run of equal ones."""
    # A run of equal groups has one move, because any of them gives the same structure.
    shapes = [(unit.form, [node for node, _ in unit.parts]) for unit in chain]
    return [s for s in range(len(chain)) if s == 0 or shapes[s] != shapes[s - 1]]


def _allowed(problem: Problem, *chains: Sequence[Unit]) -> Structure | None:
    """Return the replicas, if job and nodes allow all their groups."""
    if all(problem.may_be_a_unit(unit) for chain in chains for unit in chain):
        return tuple([tuple(chain) for chain in chains])
    return None
