"""Moves of the groups that divide the sequences of a stage (context parallelism).

A stage's GPUs become wider or narrower tensor-parallel groups, and two stages become one whose
groups divide sequences.  `seeds.divided` brings the first structures with such a stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron_hetero.planner.moves.places import Change, ReplicaPlaces
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


def _firsts(chain: Chain) -> list[int]:
    """Return stages: the first of each run of equal ones."""
    # A run of equal groups has one move, because any of them gives the same structure.
    shapes = [(unit.form, [node for node, _ in unit.parts]) for unit in chain]
    return [s for s in range(len(chain)) if s == 0 or shapes[s] != shapes[s - 1]]


def _allowed(problem: Problem, chain: Sequence[Unit]) -> Structure | None:
    """Return the replica, if job and nodes allow all its groups."""
    return (tuple(chain),) if all(map(problem.may_be_a_unit, chain)) else None
