"""Every placement of a small problem: the optimum, by the cost model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations, pairwise
from math import comb, prod

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.fill import placed_replica
from megatron_hetero.planner.problem import Chain, Problem, Unit
from megatron_hetero.planner.scoreboard import Scoreboard

Kind = tuple[str, int]
"""A unit up to the choice among a node's equal GPUs: (node, width)."""


class Exhaustive:
    """Enumerates units, replicas, stage orders, layers and micro-batches, up to symmetry.

    Declines (scores nothing) when there are more than `max_placements`.
    """

    name = "exhaustive"

    def __init__(self, max_placements: int = 3000, max_gpus: int = 6) -> None:
        self.max_placements = max_placements
        self.max_gpus = max_gpus

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem = board.problem
        if problem.num_gpus > self.max_gpus:
            return
        structures: list[tuple[Chain, ...]] = []
        num_placements = 0
        for structure in all_structures(problem):
            num_placements += num_fillings(problem, structure)
            if num_placements > self.max_placements:
                return
            structures.append(structure)
        for structure in structures:
            for placement in fillings(problem, structure):
                board.score(placement, self.name)


def all_structures(problem: Problem) -> Iterator[tuple[Chain, ...]]:
    """Every choice of units, replicas and stage orders; replicas come in one order only."""
    counts = list(problem.replica_counts())
    for kinds in _unit_choices(problem, 0):
        for chains in _arrangements(Counter(kinds), ()):
            if len(chains) in counts:
                structure = _with_gpus(problem, chains)
                if all(problem.chain_is_allowed(chain) for chain in structure):
                    yield structure


def _unit_choices(problem: Problem, index: int) -> Iterator[tuple[Kind, ...]]:
    """Every multiset of units, node by node; GPUs that no unit takes are idle."""
    if index == len(problem.nodes):
        yield ()
        return
    node = problem.nodes[index].name
    for cut in _cuts(len(problem.gpus[node]), problem.widths[node]):
        for rest in _unit_choices(problem, index + 1):
            yield tuple((node, width) for width in cut) + rest


def _cuts(num_gpus: int, widths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every multiset of widths with a sum of at most `num_gpus`, widest first."""
    yield ()
    for width in widths:
        if width <= num_gpus:
            narrower = tuple(w for w in widths if w <= width)
            for rest in _cuts(num_gpus - width, narrower):
                yield (width, *rest)


def _arrangements(
    kinds: Counter[Kind], least: tuple[Kind, ...]
) -> Iterator[tuple[tuple[Kind, ...], ...]]:
    """All ways to put every unit into an ordered chain; chains in ascending order."""
    if not kinds.total():
        yield ()
        return
    for chain in _sequences(kinds):
        if chain >= least:
            left = kinds.copy()
            left.subtract(chain)
            for rest in _arrangements(left, chain):
                yield (chain, *rest)


def _sequences(kinds: Counter[Kind]) -> Iterator[tuple[Kind, ...]]:
    """All non-empty ordered sequences drawn from a multiset."""
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
            gpus = problem.gpus[node][taken[node] : taken[node] + width]
            taken[node] += width
            units.append(Unit(node, gpus))
        structure.append(tuple(units))
    return tuple(structure)


def num_fillings(problem: Problem, structure: tuple[Chain, ...]) -> int:
    """Ways to divide layers and micro-batches over given stages."""
    splits = prod(comb(problem.num_layers - 1, len(chain) - 1) for chain in structure)
    return splits * comb(problem.num_micro_batches - 1, len(structure) - 1)


def fillings(problem: Problem, structure: tuple[Chain, ...]) -> Iterator[Placement]:
    """Every way to divide layers over stages and micro-batches over replicas."""
    layer_choices: list[tuple[tuple[int, ...], ...]] = [()]
    for chain in structure:
        splits = list(compositions(problem.num_layers, len(chain)))
        layer_choices = [(*chosen, split) for chosen in layer_choices for split in splits]
    for shares in compositions(problem.num_micro_batches, len(structure)):
        for layers in layer_choices:
            yield Placement(
                tuple(
                    placed_replica(chain, split, share)
                    for chain, split, share in zip(structure, layers, shares, strict=True)
                )
            )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write `total` as `parts` positive integers."""
    for cuts in combinations(range(1, total), parts - 1):
        edges = (0, *cuts, total)
        yield tuple(b - a for a, b in pairwise(edges))
