"""The main search: widths for each kind of node, replicas, who works in which, then the rest.

For every choice of widths and number of replicas, units are dealt to replicas in a few ways, each
replica's stages are ordered, and layers and micro-batches follow.  Choices are visited
from the most promising on, by a quick optimistic time, up to a limit in placements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.order import Orderer
from megatron_hetero.planner.strategy import SEED_WORK
from megatron_hetero.planner.units import Chain, Unit

_MAX_WIDTH_CHOICES = 2000


@dataclass(frozen=True)
class _Choice:
    units: tuple[Unit, ...]
    num_replicas: int


class Constructive:
    """Builds placements from width choices and deals; see the module."""

    name = "constructive"

    def __init__(self, max_work: int = SEED_WORK) -> None:
        self.max_work = max_work
        """Limit of the search in stages built."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem = board.problem
        own_flags = OwnFlags(problem)
        orderer = Orderer(own_flags)
        work = 0
        for choice in _ranked_choices(problem):
            for deal in _deals(problem, choice):
                # Each replica's units in the best order of stages.
                chains = [orderer.best(units, choice.num_replicas) for units in deal]
                placed: list[Chain] = [chain for chain in chains if chain is not None]
                # A replica without an allowed order makes the deal useless.
                if len(placed) < choice.num_replicas:
                    continue
                filled = [own_flags.nearest(chain, len(placed))[1] for chain in placed]
                placement = own_flags.placement(placed, filled)
                if placement is not None:
                    board.score(placement, self.name, whole=False)
                work += len(choice.units)
            if work > self.max_work:
                return


def cut_node(problem: Problem, node: Node, width: int) -> list[Unit]:
    """Return a node's GPUs in units of `width`; what is left over in the widest units that fit."""
    gpus, units = list(problem.gpus[node.name]), []
    while gpus:
        fitting = [w for w in problem.widths[node.name] if w <= min(width, len(gpus))]
        if not fitting:
            break
        taken, gpus = gpus[: fitting[-1]], gpus[fitting[-1] :]
        units.append(Unit(node.name, tuple(taken)))
    return units


def layers_per_s(problem: Problem, unit: Unit) -> float:
    """Return decoder layers that a unit processes in a second, micro-batch by micro-batch."""
    node = problem.cluster.node_by_name[unit.node]
    rows = problem.workload.model.vocab_size
    return 1 / problem.costs.pieces(node, unit.width, rows).layer.total_s


def _ranked_choices(problem: Problem) -> list[_Choice]:
    """Return choices from the best optimistic time on."""
    ranked = []
    num_micro_batches, num_layers = problem.num_micro_batches, problem.num_layers
    # Few unlike units are in thousands of choices.
    speed_of = cache(partial(layers_per_s, problem))
    for units in _width_choices(problem):
        speed = sum(map(speed_of, units))
        for num_replicas in _replica_counts(problem, len(units)):
            depth = len(units) / num_replicas
            # A pipeline of `depth` stages fills and drains for `depth` - 1 micro-batches.
            fill = 1 + (depth - 1) * num_replicas / num_micro_batches
            time_s = num_micro_batches * num_layers / speed * fill
            ranked.append((time_s, len(units), num_replicas, units))
    ranked.sort()
    return [_Choice(units, num_replicas) for _, _, num_replicas, units in ranked]


def _width_choices(problem: Problem) -> Iterator[tuple[Unit, ...]]:
    """Yield a single unit of each width, then a width (or idleness) for every class of equal
    nodes."""
    # Equal nodes get equal widths.
    classes: dict[tuple[str, int, Link, str], list[Node]] = {}
    for node in problem.nodes:
        key = (node.gpu_type.name, len(problem.gpus[node.name]), node.link, node.site)
        classes.setdefault(key, []).append(node)
    groups = list(classes.values())
    # First the single units, of which plans of one stage are made.
    for nodes in groups:
        for width in problem.widths[nodes[0].name]:
            unit, *others = cut_node(problem, nodes[0], width)
            if others or len(nodes) > 1:
                yield (unit,)
    nodes_by_name = problem.cluster.node_by_name
    cut = cache(lambda name, width: cut_node(problem, nodes_by_name[name], width))
    # Then all combinations of widths, or idleness, thinned to a number that can be tried.
    menus = [[*problem.widths[nodes[0].name], 0] for nodes in groups]
    while _product(menus) > _MAX_WIDTH_CHOICES:
        # Drop the width nearest to its neighbour from the longest menu; keep 1, widest and idle.
        longest = max(menus, key=len)
        if len(longest) <= 2:
            break
        del longest[len(longest) // 2]
    for index, widths in enumerate(product(*menus)):
        if index >= _MAX_WIDTH_CHOICES:
            return
        units = tuple(
            unit
            for nodes, width in zip(groups, widths, strict=True)
            if width
            for node in nodes
            for unit in cut(node.name, width)
        )
        if units:
            yield units


def _product(menus: Sequence[Sequence[int]]) -> int:
    total = 1
    for menu in menus:
        total *= len(menu)
    return total


def _replica_counts(problem: Problem, num_units: int) -> list[int]:
    allowed = [n for n in problem.replica_counts() if n <= num_units]
    # Fewer replicas would be deeper than the limits allow.
    fewest = -(-num_units // problem.max_stages())
    return [n for n in allowed if n >= fewest] or allowed[-1:]


def _deals(problem: Problem, choice: _Choice) -> Iterator[list[list[Unit]]]:
    """Yield ways to give units to replicas: equal speed, equal memory, one class after the
    other, and neighbours together."""
    nodes = problem.cluster.node_by_name
    num_replicas, units = choice.num_replicas, choice.units
    if num_replicas == 1:
        yield [list(units)]
        return

    def speed(unit: Unit) -> float:
        return layers_per_s(problem, unit)

    def memory(unit: Unit) -> float:
        return float(nodes[unit.node].gpu_type.memory_bytes * unit.width)

    def place(unit: Unit) -> tuple[str, str, str]:
        node = nodes[unit.node]
        return node.site, node.gpu_type.name, node.name

    # By speed and by memory; like cards; and in runs of neighbours by both.
    deals = [
        _balanced(sorted(units, key=lambda u: (-speed(u), u)), num_replicas, speed),
        _balanced(sorted(units, key=lambda u: (-memory(u), u)), num_replicas, memory),
        _dealt(sorted(units, key=lambda u: (place(u), -u.width, u)), num_replicas),
        _contiguous(sorted(units, key=lambda u: (place(u), u)), num_replicas, speed),
        _contiguous(sorted(units, key=lambda u: (place(u), u)), num_replicas, memory),
    ]
    seen = []
    for deal in deals:
        if deal not in seen and all(deal):
            seen.append(deal)
            yield deal


def _balanced(
    units: Sequence[Unit], num_replicas: int, weight: Callable[[Unit], float]
) -> list[list[Unit]]:
    """Deal the heaviest first, each to the replica that has least (longest-processing-time
    rule)."""
    deal: list[list[Unit]] = [[] for _ in range(num_replicas)]
    loads = [0.0] * num_replicas
    for unit in units:
        lightest = loads.index(min(loads))
        deal[lightest].append(unit)
        loads[lightest] += weight(unit)
    return deal


def _dealt(units: Sequence[Unit], num_replicas: int) -> list[list[Unit]]:
    """Deal like cards: every replica gets the same mix, as far as it goes."""
    return [list(units[r::num_replicas]) for r in range(num_replicas)]


def _contiguous(
    units: Sequence[Unit], num_replicas: int, weight: Callable[[Unit], float]
) -> list[list[Unit]]:
    """Runs of neighbours of about equal weight; each replica gets at least one unit."""
    deal: list[list[Unit]] = [[] for _ in range(num_replicas)]
    left_weight, replica = sum(weight(unit) for unit in units), 0
    target = left_weight / num_replicas
    load = 0.0
    for index, unit in enumerate(units):
        # Every replica that is still to come needs a unit.
        must_move = len(units) - index <= num_replicas - replica - 1
        too_much = load + weight(unit) / 2 > target
        if deal[replica] and replica + 1 < num_replicas and (must_move or too_much):
            left_weight -= load
            replica += 1
            # The target is the mean of what is left: rounding does not pile up at the end.
            target = left_weight / (num_replicas - replica)
            load = 0.0
        deal[replica].append(unit)
        load += weight(unit)
    return deal
