"""Every grid of ranks that stock Megatron can lay over a cluster.

Nodes one after the other, each with some of its GPUs; their GPUs are numbered in this order, in
groups of one tensor-parallel width, and the groups fill a grid of replicas and stages in one of
Megatron's two orders of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_hetero.cluster.spec import Node
from megatron_hetero.plan.stock_ranks import RANK_ORDERS, RankOrder, places_by_rank
from megatron_hetero.planner.columns.kinds import Kind, kinds_of
from megatron_hetero.planner.problem import Chain, Problem, Unit
from megatron_hetero.planner.shapes.symmetric import equal_units

MAX_ORDERS = 20_000
"""Orders of nodes and of what they give; with more, every node gives all it has."""


@dataclass(frozen=True)
class StockGrid:
    """Equal replicas: `chains` is [replica][stage]."""

    chains: tuple[Chain, ...]
    rank_order: RankOrder

    @property
    def num_stages(self) -> int:
        """Pipeline depth."""
        return len(self.chains[0])

    @property
    def num_gpus(self) -> int:
        """GPUs of all replicas."""
        return len(self.chains) * self.num_stages * self.width

    @property
    def width(self) -> int:
        """Tensor-parallel width."""
        return self.chains[0][0].width


def stock_grids(problem: Problem) -> tuple[tuple[StockGrid, ...], bool]:
    """Return all grids, of those that differ in the names of like nodes alone one; whether they are
    all.

    A tensor-parallel group stays on one node.
    """
    kinds = [part for kind in kinds_of(problem) for part in _exchangeable(problem, kind)]
    found: dict[tuple[object, ...], StockGrid] = {}
    is_complete = True
    for width in sorted({w for kind in kinds for w in kind.widths}):
        givers = [kind for kind in kinds if width in kind.widths]
        if _num_orders(givers, width) > MAX_ORDERS:
            is_complete = False
            orders = _orders(givers, [[kind.num_gpus // width] for kind in givers])
        else:
            most = [kind.num_gpus // width for kind in givers]
            orders = _orders(givers, [list(range(1, n + 1)) for n in most])
        for order in orders:
            units = _units(problem, order, width)
            for grid in _grids(problem, units):
                found.setdefault(_content(grid), grid)
    return tuple(found.values()), is_complete


def _exchangeable(problem: Problem, kind: Kind) -> Iterator[Kind]:
    """Yield the nodes of a kind that have the same links to all other nodes."""
    groups: list[list[Node]] = []
    for node in kind.nodes:
        group = next((g for g in groups if _same_links(problem, g[0], node)), None)
        if group is None:
            groups.append([node])
        else:
            group.append(node)
    for group in groups:
        yield replace(kind, nodes=tuple(group))


def _same_links(problem: Problem, one: Node, other: Node) -> bool:
    link = problem.cluster.link
    a, b = one.devices[0], other.devices[0]
    rest = [n.devices[0] for n in problem.nodes if n.name not in (one.name, other.name)]
    return link(a, b) == link(b, a) and all(
        link(a, c) == link(b, c) and link(c, a) == link(c, b) for c in rest
    )


_Order = tuple[tuple[Kind, int, int], ...]
"""Nodes one after the other: kind, which node of it, how many groups it gives."""


def _num_orders(kinds: Sequence[Kind], width: int) -> int:
    """Bound the number of orders from below: all sequences of the choices that nodes have."""
    num_nodes = sum(len(kind.nodes) for kind in kinds)
    num_orders, total = 1, 1
    choices = sum(max(1, kind.num_gpus // width) for kind in kinds)
    for _ in range(num_nodes):
        num_orders *= choices
        total += num_orders
        if total > MAX_ORDERS:
            break
    return total


def _orders(kinds: Sequence[Kind], amounts: Sequence[Sequence[int]]) -> Iterator[_Order]:
    """Yield every sequence of nodes with the amounts that they give; like nodes come by number."""

    def extend(order: _Order, used: tuple[int, ...]) -> Iterator[_Order]:
        if order:
            yield order
        for index, kind in enumerate(kinds):
            if used[index] == len(kind.nodes):
                continue
            more = tuple(n + (i == index) for i, n in enumerate(used))
            for amount in amounts[index]:
                yield from extend((*order, (kind, used[index], amount)), more)

    yield from extend((), (0,) * len(kinds))


def _units(problem: Problem, order: _Order, width: int) -> list[Unit]:
    units = []
    for kind, index, amount in order:
        units += equal_units(problem, kind.nodes[index], width)[:amount]
    return units


def _grids(problem: Problem, units: Sequence[Unit]) -> Iterator[StockGrid]:
    """Yield every way to fill replicas and stages with all of the units."""
    for num_replicas in problem.replica_counts():
        if len(units) % num_replicas:
            continue
        num_stages = len(units) // num_replicas
        if num_stages > problem.max_stages():
            continue
        for order in RANK_ORDERS:
            place = {
                (d, p): units[rank]
                for rank, (d, p, _) in enumerate(places_by_rank(order, num_replicas, num_stages, 1))
            }
            chains = tuple(
                tuple(place[d, p] for p in range(num_stages)) for d in range(num_replicas)
            )
            if all(problem.chain_is_allowed(chain) for chain in chains):
                yield StockGrid(chains, order)
            if num_replicas == 1 or num_stages == 1:
                break


def _content(grid: StockGrid) -> tuple[object, ...]:
    """Return equal for grids with the same nodes at the same places; replicas may change theirs."""
    return grid.width, tuple(sorted(tuple(unit.node for unit in c) for c in grid.chains))
