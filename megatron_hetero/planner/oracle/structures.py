"""Every way to form pipelines of a small problem's GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise

from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.units import Chain, Unit

Kind = tuple[tuple[tuple[str, int], ...], int]
"""A unit up to the choice among a node's equal GPUs: groups on each node, and their width."""


def all_structures(problem: Problem, *, divided: bool = False) -> Iterator[tuple[Chain, ...]]:
    """Yield every choice of units, replicas and stage orders; replicas come in one order only.

    Stages are single groups; with `divided`, one at least is of several, which divide sequences.
    """
    counts = list(problem.replica_counts())
    for groups in _unit_choices(problem, 0):
        choices = sorted(_joined(groups) - {tuple(sorted(groups))}) if divided else [groups]
        for kinds in choices:
            for chains in _arrangements(Counter(kinds), ()):
                if len(chains) in counts:
                    structure = _with_gpus(problem, chains)
                    if all(
                        problem.chain_is_allowed(chain) and all(map(problem.may_be_a_unit, chain))
                        for chain in structure
                    ):
                        yield structure


def _unit_choices(problem: Problem, index: int) -> Iterator[tuple[Kind, ...]]:
    """Yield every multiset of units, node by node; GPUs that no unit takes are idle."""
    if index == len(problem.nodes):
        yield ()
        return
    node = problem.nodes[index].name
    for cut in _cuts(len(problem.gpus[node]), problem.widths[node]):
        for rest in _unit_choices(problem, index + 1):
            yield tuple((((node, 1),), width) for width in cut) + rest


def _joined(groups: tuple[Kind, ...]) -> set[tuple[Kind, ...]]:
    """Return every multiset of units that groups of one width form, single or together."""
    if not groups:
        return {()}
    (parts, width), *rest = groups
    found = set()
    for units in _joined(tuple(rest)):
        found.add(tuple(sorted((groups[0], *units))))
        for u, (others, own_width) in enumerate(units):
            if own_width == width:
                numbers = Counter(dict(parts)) + Counter(dict(others))
                one = tuple(sorted(numbers.items())), width
                found.add(tuple(sorted((*units[:u], one, *units[u + 1 :]))))
    return found


def _cuts(num_gpus: int, widths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield every multiset of widths with a sum of at most `num_gpus`, widest first."""
    yield ()
    for width in widths:
        if width <= num_gpus:
            narrower = tuple(w for w in widths if w <= width)
            for rest in _cuts(num_gpus - width, narrower):
                yield (width, *rest)


def _arrangements(
    kinds: Counter[Kind], least: tuple[Kind, ...]
) -> Iterator[tuple[tuple[Kind, ...], ...]]:
    """Yield all ways to put every unit into an ordered chain; chains in ascending order."""
    if not kinds.total():
        yield ()
        return
    for chain in _sequences(kinds):
        # Chains rise, so that replicas in another order are not a second structure.
        if chain >= least:
            left = kinds.copy()
            left.subtract(chain)
            for rest in _arrangements(left, chain):
                yield (chain, *rest)


def _sequences(kinds: Counter[Kind]) -> Iterator[tuple[Kind, ...]]:
    """Yield all non-empty ordered sequences drawn from a multiset."""
    for kind in sorted(kinds):
        if kinds[kind]:
            yield (kind,)
            left = kinds.copy()
            left[kind] -= 1
            for rest in _sequences(left):
                yield (kind, *rest)


def _with_gpus(problem: Problem, chains: tuple[tuple[Kind, ...], ...]) -> tuple[Chain, ...]:
    """Give every unit the next free GPUs of its nodes."""
    taken: Counter[str] = Counter()
    structure = []
    for chain in chains:
        units = []
        for parts, width in chain:
            # Equal GPUs of a node are taken in order: which of them does not matter.
            indices = {}
            for node, num_groups in parts:
                end = taken[node] + num_groups * width
                indices[node] = problem.gpus[node][taken[node] : end]
                taken[node] = end
            first, *beyond = indices.items()
            units.append(Unit(*first, sum(dict(parts).values()), tuple(beyond)))
        structure.append(tuple(units))
    return tuple(structure)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write `total` as `parts` positive integers."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(edges))
