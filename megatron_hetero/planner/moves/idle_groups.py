"""Moves that take idle GPUs: a stage more, a wider stage, a replica more."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.planner.moves.places import ReplicaPlaces
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Structure, Unit

Idle = Mapping[str, tuple[int, ...]]
"""GPUs of each node that no stage has, ascending."""
Scope = tuple[int, ...]
"""Replicas that change together."""
TakesIdle = Callable[[ReplicaPlaces, Structure, Sequence[Scope], Idle], Iterator[Structure]]
"""A move that brings idle GPUs into the replicas of each scope."""


def idle_of(problem: Problem, structure: Sequence[Chain]) -> Idle:
    """Return the GPUs that a structure leaves idle."""
    taken = {device for chain in structure for unit in chain for device in unit.devices}
    return {
        name: tuple([index for index in indices if (name, index) not in taken])
        for name, indices in problem.gpus.items()
    }


def insert(
    replica: ReplicaPlaces, structure: Structure, scopes: Sequence[Scope], idle: Idle
) -> Iterator[Structure]:
    """Make idle GPUs a stage of the replicas of each scope."""
    problem, chain = replica.problem, replica.chain
    hop = problem.likeness.hop
    tried: set[Hashable] = set()
    for node in problem.nodes:
        for width in problem.widths[node.name]:
            # Widths rise: wider ones fit even less.
            if width > len(idle[node.name]):
                break
            for t in replica.gaps:
                # Links to both neighbours tell places apart.
                near = tuple([hop(unit.node, node.name) for unit in chain[max(t - 1, 0) : t + 1]])
                key = _image(problem, node, idle), width, t, near
                if key in tried:
                    continue
                tried.add(key)
                for scope in scopes:
                    units = _taken(problem, idle, node, width, len(scope))
                    if units is not None:
                        made = list(structure)
                        for r, unit in zip(scope, units, strict=True):
                            made[r] = (*made[r][:t], unit, *made[r][t:])
                        yield tuple(made)


def widen(
    replica: ReplicaPlaces, structure: Structure, scopes: Sequence[Scope], idle: Idle
) -> Iterator[Structure]:
    """Make a stage wider by idle GPUs of its node."""
    for s, unit in enumerate(replica.chain):
        free = idle[unit.node] if unit.is_plain else ()
        for width in replica.problem.widths[unit.node]:
            if 0 < width - unit.width <= len(free):
                more = unit.indices + free[: width - unit.width]
                wide = Unit(unit.node, tuple(sorted(more)))
                yield _with_stage(structure, scopes[0][0], s, wide)


def _with_stage(structure: Structure, r: int, s: int, unit: Unit) -> Structure:
    """Return the structure with another group as a stage of a replica."""
    chain = structure[r]
    return (*structure[:r], (*chain[:s], unit, *chain[s + 1 :]), *structure[r + 1 :])


def begin(problem: Problem, structure: Structure, idle: Idle) -> Iterator[Structure]:
    """Begin a replica of one stage; of nodes that are alike, on the first."""
    # Reversed, so that the first of like nodes stays.
    firsts = {_image(problem, node, idle): node for node in reversed(problem.nodes)}
    for node in reversed(firsts.values()):
        free = idle[node.name]
        for width in problem.widths[node.name]:
            if width > len(free):
                break
            yield (*structure, (Unit(node.name, free[:width]),))


def _taken(problem: Problem, idle: Idle, node: Node, width: int, number: int) -> list[Unit] | None:
    """Return idle groups, of this node first and then of nodes like it; None if there are too
    few."""
    like = problem.likeness.node
    alike = [n for n in problem.nodes if n.site == node.site and like(n.name) == like(node.name)]
    units: list[Unit] = []
    # On this node as long as it has idle GPUs, then on nodes like it.
    for one in [node, *[n for n in alike if n is not node]]:
        free = idle[one.name]
        for start in range(0, len(free) - width + 1, width):
            if len(units) == number:
                break
            units.append(Unit(one.name, free[start : start + width]))
    return units if len(units) == number else None


def _image(problem: Problem, node: Node, idle: Idle) -> Hashable:
    """Return equal for like nodes of a site with as many idle GPUs."""
    return problem.likeness.node(node.name), node.site, len(idle[node.name])
