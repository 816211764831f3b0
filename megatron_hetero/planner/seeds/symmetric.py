"""Plans with equal replicas and widths, as stock Megatron expresses them; also the naive plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heapreplace
from itertools import accumulate, groupby, islice
from math import inf

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.completion.filled import placed_replica
from megatron_hetero.planner.division.layers import split_layers
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.problem import Problem, equal_units
from megatron_hetero.planner.shapes.order import some_orders
from megatron_hetero.planner.strategy import SEED_WORK
from megatron_hetero.planner.units import Chain, Structure, Unit, along_and_across


class Symmetric:
    """Every (TP, PP, DP) grid on the GPUs of one type, and on all GPUs.

    One width, one layer split for all replicas (even, and by the slowest and smallest GPU of each
    stage position), equal micro-batches.  PP 1 and DP 1 at width 1 is the plan on a single GPU.
    Most can be numbered as stock Megatron does, which the board finds out.
    """

    def __init__(self, even_layers: bool = False, max_work: int = SEED_WORK) -> None:
        self.even_layers = even_layers
        """Only the even split: Megatron without a pipeline layout."""
        self.name = "symmetric-even" if even_layers else "symmetric"
        self.max_work = max_work
        """Limit in stages priced; the grids with the best quick times are priced first."""

    def search(self, board: Scoreboard) -> None:
        """See `Strategy.search`."""
        problem, work = board.problem, 0
        for grid in _ranked(problem):
            for chains in _allowed(problem, grid):
                splits = _shared_layers(problem, chains)
                # The even split comes first.
                for layers in islice(splits, 1) if self.even_layers else splits:
                    share = problem.num_micro_batches // len(chains)
                    placement = Placement(tuple(placed_replica(c, layers, share) for c in chains))
                    # The exchange of a grid whose pipelines are beaten alone is not priced.
                    board.score(placement, self.name, whole=False)
                    work += len(chains) * len(layers)
            if work > self.max_work:
                return


@dataclass(frozen=True)
class _Units:
    """Units of equal width, in the order of the pipelines."""

    units: tuple[Unit, ...]
    layer_s: tuple[float, ...]
    """Seconds of one layer, per unit."""

    @cached_property
    def speed_sums(self) -> Sequence[float]:
        """Layers a second of the first units together: of one unit, two units, ..."""
        return list(accumulate(1 / time_s for time_s in self.layer_s))


@dataclass(frozen=True)
class _EqualGrid:
    of: _Units
    num_replicas: int
    num_stages: int

    def least_time_s(self, problem: Problem) -> float:
        """Return about the pipelines' time by the mean speed of all units, and in fractions of
        layers."""
        num_replicas, num_units = self.num_replicas, self.num_replicas * self.num_stages
        period_s = problem.num_layers * num_replicas / self.of.speed_sums[num_units - 1]
        return self._num_periods(problem) * period_s

    def quick_time_s(self, problem: Problem) -> float:
        """Return about the pipelines' time: layers divided by the speed of the slowest unit at
        each place of pipelines across the nodes."""
        num_replicas, num_stages = self.num_replicas, self.num_stages
        layer_s = self.of.layer_s
        times_s = [
            max(layer_s[s * num_replicas : (s + 1) * num_replicas]) for s in range(num_stages)
        ]
        most = [problem.num_layers] * num_stages
        layers = split_layers(problem.num_layers, times_s, [0.0] * num_stages, most)
        if layers is None:
            return inf
        period_s = max(n * time_s for n, time_s in zip(layers, times_s, strict=True))
        return self._num_periods(problem) * period_s

    def _num_periods(self, problem: Problem) -> int:
        return problem.num_micro_batches // self.num_replicas + self.num_stages - 1


def grids(problem: Problem) -> Iterator[Structure]:
    """Yield the chains of all grids, the best quick time first."""
    for grid in _ranked(problem):
        yield from _allowed(problem, grid)


def _ranked(problem: Problem) -> Iterator[_EqualGrid]:
    """Yield all grids, the best quick time first.

    Few of them are ever priced: quick times are worked out when the least that they can be comes
    first.
    """
    # (time, number of the grid, whether the time is the quick one or its lower bound).
    queue: list[tuple[float, int, bool]] = []
    grids: list[_EqualGrid] = []
    for nodes in node_groups(problem):
        for width in sorted({w for node in nodes for w in problem.widths[node.name]}):
            units = tuple(u for node in nodes for u in equal_units(problem, node, width))
            for grid in _grids(problem, _Units(units, _layer_s(problem, units))):
                queue.append((grid.least_time_s(problem), len(grids), False))
                grids.append(grid)
    heapify(queue)
    while queue:
        # A lower bound at the top is replaced by the quick time, which may sink in the heap.
        _, number, is_known = queue[0]
        if is_known:
            heappop(queue)
            yield grids[number]
        else:
            heapreplace(queue, (grids[number].quick_time_s(problem), number, True))


def node_groups(problem: Problem) -> Iterator[Sequence[Node]]:
    """Yield the nodes of each GPU type; then (where there are several types) all nodes, those of
    one site and type together, in `some_orders` of such groups."""
    # The largest nodes first: a grid that needs few GPUs lies on few nodes, whatever their names.
    nodes = sorted(problem.nodes, key=lambda n: (n.site, -len(problem.gpus[n.name]), n.name))
    types = sorted({node.gpu_type.name for node in nodes})
    for name in types:
        yield [node for node in nodes if node.gpu_type.name == name]
    if len(types) == 1:
        return
    nodes.sort(key=_site_and_type)
    groups = [list(group) for _, group in groupby(nodes, key=_site_and_type)]
    for order in some_orders(groups):
        yield [node for group in order for node in group]


def _site_and_type(node: Node) -> tuple[str, str]:
    return node.site, node.gpu_type.name


def _layer_s(problem: Problem, units: tuple[Unit, ...]) -> tuple[float, ...]:
    costs, nodes = problem.costs, problem.cluster.node_by_name
    rows = costs.vocab_rows([units[0].width]) if units else 0
    layer_s: dict[str, float] = {}
    for unit in units:
        if unit.node not in layer_s:
            pieces = costs.pieces(nodes[unit.node], unit.width, rows)
            layer_s[unit.node] = pieces.layer.total_s
    return tuple(layer_s[unit.node] for unit in units)


def _grids(problem: Problem, units: _Units) -> Iterator[_EqualGrid]:
    """Yield every number of equal replicas and stages."""
    num_units = len(units.units)
    for num_replicas in problem.replica_counts():
        if num_replicas > num_units:
            return
        # Equal replicas have equal numbers of micro-batches.
        if problem.num_micro_batches % num_replicas:
            continue
        for num_stages in range(1, min(num_units // num_replicas, problem.max_stages()) + 1):
            yield _EqualGrid(units, num_replicas, num_stages)


def _allowed(problem: Problem, grid: _EqualGrid) -> Iterator[Structure]:
    """Yield the grid with pipelines along and across the nodes."""
    units = grid.of.units[: grid.num_replicas * grid.num_stages]
    for structure in along_and_across(units, grid.num_replicas):
        if all(problem.chain_is_allowed(chain) for chain in structure):
            yield structure


def _shared_layers(problem: Problem, chains: Sequence[Chain]) -> Iterator[tuple[int, ...]]:
    """Yield the even split (left-over layers on the last stages), and the minimax one for the
    slowest and smallest GPU at each stage position; where that fits nowhere, the one that lacks
    least."""
    num_stages = len(chains[0])
    # The even split, as Megatron makes it without a layout.
    quotient, left_over = divmod(problem.num_layers, num_stages)
    even = tuple(quotient + (i >= num_stages - left_over) for i in range(num_stages))
    yield even
    costs, nodes = problem.costs.sharded_among(len(chains)), problem.cluster.node_by_name
    width = chains[0][0].width
    rows = costs.vocab_rows([width])
    # Slowest times and smallest memory over all replicas, by stage.
    per_layer, base, caps, missing, added = [], [], [], [], []
    share = problem.num_micro_batches // len(chains)
    loads_s = [costs.send_loads_s([unit.devices for unit in chain]) for chain in chains]
    for i in range(num_stages):
        first, last = i == 0, i == num_stages - 1
        # Replicas on one node are alike at this stage.
        held = dict.fromkeys((c[i].node, of[i]) for c, of in zip(chains, loads_s, strict=True))
        in_flight = min(num_stages - i, share)
        pieces = [(costs.pieces(nodes[node], width, rows), load_s) for node, load_s in held]
        memories = [
            costs.memory(nodes[node], width, first, last, in_flight, rows) for node, _ in held
        ]
        per_layer.append(max(p.layer.total_s for p, _ in pieces))
        base.append(max(p.stage(0, first, last).total_s + load_s for p, load_s in pieces))
        caps.append(min(m.max_layers for m in memories))
        missing.append(max(float(m.peak_bytes(0) - m.capacity_bytes) for m in memories))
        added.append(max(float(m.bytes_per_layer) for m in memories))
    # The split by time if one fits, otherwise by what is missing.
    balanced = split_layers(problem.num_layers, per_layer, base, caps)
    if balanced is None:
        caps = [problem.num_layers] * num_stages
        balanced = split_layers(problem.num_layers, added, missing, caps)
    if balanced is not None and balanced != even:
        yield balanced
