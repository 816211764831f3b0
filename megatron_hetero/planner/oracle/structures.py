"""Every way to form pipelines of a small problem's GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise

from megatron_hetero.planner.problem import Chain, Problem, Unit

Kind = tuple[str, int]
"""A unit up to the choice among a node's equal GPUs: (node, width)."""


def all_structures(problem: Problem) -> Iterator[tuple[Chain, ...]]:
    """Yield every choice of units, replicas and stage orders; replicas come in one order only."""
    counts = list(problem.replica_counts())
    for kinds in _unit_choices(problem, 0):
        for chains in _arrangements(Counter(kinds), ()):
            if len(chains) in counts:
                structure = _with_gpus(problem, chains)
                if all(problem.chain_is_allowed(chain) for chain in structure):
                    yield structure


def _unit_choices(problem: Problem, index: int) -> Iterator[tuple[Kind, ...]]:
    """Yield every multiset of units, node by node; GPUs that no unit takes are idle."""
    if index == len(problem.nodes):
        yield ()
        return
    node = problem.nodes[index].name
    for cut in _cuts(len(problem.gpus[node]), problem.widths[node]):
        for rest in _unit_choices(problem, index + 1):
            yield tuple((node, width) for width in cut) + rest


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
    """Give every unit the next free GPUs of its node."""
    taken: Counter[str] = Counter()
    structure = []
    for chain in chains:
        units = []
        for node, width in chain:
            # Equal GPUs of a node are taken in order: which of them does not matter.
            gpus = problem.gpus[node][taken[node] : taken[node] + width]
            taken[node] += width
            units.append(Unit(node, gpus))
        structure.append(tuple(units))
    return tuple(structure)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write `total` as `parts` positive integers."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(edges))
