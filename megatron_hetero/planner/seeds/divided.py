"""Structures whose stages divide sequences among groups (context parallelism), to start from.

Groups of one width, in the order of their nodes, become stages of so many groups each, and these
make a grid of equal replicas; `moves.divisions` varies them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from heapq import nsmallest

from megatron_hetero.planner.problem import Problem, equal_units
from megatron_hetero.planner.seeds.symmetric import node_groups
from megatron_hetero.planner.units import Structure, Unit, along_and_across, joined_units


def divided_structures(problem: Problem, below_s: float, most: int) -> list[Structure]:
    """Return the most promising grids with a shorter step than `below_s`, by speed alone.

    Args:
        most: structures in all.
    """
    if not problem.divides_sequences:
        return []
    found: dict[Structure, float] = {}
    for units in _unit_lists(problem):
        grids = list(_grids(problem, len(units)))
        most_per_s = sum(_speeds(problem, units, _layer_at_least_s))
        # A cheap lower bound rules out most lists before exact prices are asked.
        if all(_least_s(problem, grid, most_per_s) >= below_s for grid in grids):
            continue  # exact speeds are lower yet
        layers_per_s = sum(_speeds(problem, units, _layer_s))
        for grid in grids:
            least_s = _least_s(problem, grid, layers_per_s)
            for structure in along_and_across(units, grid[0]) if least_s < below_s else ():
                if all(problem.chain_is_allowed(chain) for chain in structure):
                    found.setdefault(structure, least_s)
    return nsmallest(most, found, key=lambda structure: found[structure])


def _unit_lists(problem: Problem) -> Iterator[tuple[Unit, ...]]:
    """Yield all groups of some nodes as units of equally many of one width."""
    for nodes in node_groups(problem):
        if not problem.dividing_nodes.issuperset(node.name for node in nodes):
            continue
        for width in sorted({w for node in nodes for w in problem.widths[node.name]}):
            of_nodes = [equal_units(problem, node, width) for node in nodes]
            groups = [unit for units in of_nodes for unit in units]
            on_a_node = set(map(len, of_nodes))
            for size in sorted(problem.context_sizes(width)):
                # In equal parts of a node, on whole nodes, or on all.
                is_plain = size & (size - 1) == 0 or size in on_a_node or size == len(groups)
                if size <= len(groups) and is_plain:
                    starts = range(0, len(groups) - size + 1, size)
                    yield tuple(joined_units(groups[i : i + size]) for i in starts)


Grid = tuple[int, int]
"""Replicas, and stages of each."""


def _grids(problem: Problem, num_units: int) -> Iterator[Grid]:
    """Yield the grids of equal replicas of so many units."""
    for num_replicas in problem.replica_counts():
        depth = num_units // num_replicas
        if depth == 0:
            return
        if num_units % num_replicas == 0 and depth <= problem.max_stages():
            yield num_replicas, depth


def _speeds(
    problem: Problem, units: tuple[Unit, ...], layer_s: Callable[[Problem, Unit, int], float]
) -> Iterator[float]:
    """Yield layers a second of each unit."""
    rows = problem.costs.vocab_rows([units[0].width])
    known: dict[tuple[object, ...], float] = {}
    for unit in units:
        key = unit.form, *[problem.likeness.node(node) for node, _ in unit.parts]
        if key not in known:
            known[key] = 1 / layer_s(problem, unit, rows)
        yield known[key]


def _layer_s(problem: Problem, unit: Unit, rows: int) -> float:
    """Return the seconds of a layer on a unit."""
    return problem.costs.stage_pieces(unit.stage, rows).layer.total_s


def _layer_at_least_s(problem: Problem, unit: Unit, rows: int) -> float:
    """Return a lower bound of `_layer_s`: the slowest group alone, without exchanges between
    groups."""
    division = unit.width, unit.context_parallel, rows
    of_like = {problem.likeness.node(node): node for node, _ in unit.parts}
    nodes = [problem.cluster.node_by_name[node] for node in of_like.values()]
    return max(problem.costs.divided_pieces(node, *division).layer.total_s for node in nodes)


def _least_s(problem: Problem, grid: Grid, layers_per_s: float) -> float:
    """Return about the pipelines' time by the mean speed of all units, in fractions of layers."""
    num_replicas, depth = grid
    period_s = problem.num_layers * num_replicas / layers_per_s
    num_periods = problem.num_micro_batches / num_replicas + depth - 1
    return num_periods * period_s
