"""Every order of a cluster's nodes that stock Megatron can number its ranks in.

Nodes one after the other, each with some of its GPUs, those of a machine without others between;
their GPUs are numbered in this order, in groups of one tensor-parallel width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.planner.problem import Problem, equal_units
from megatron_hetero.planner.shapes.kinds import Kind, kinds_of
from megatron_hetero.planner.stock.grids import StockRanks
from megatron_hetero.planner.units import Unit

MAX_ORDERS = 20_000
"""Orders of nodes and amounts that are tried.  Beyond the limit every node gives all GPUs, or as
many of the last ones as make a power of two; and where the orders of whole nodes are too many as
well, nodes of a kind come one after the other."""
_MAX_KINDS = 4
"""Kinds of nodes whose orders are all looked at where there are too many of the nodes'."""
_MAX_ORDERED_KINDS = 6
"""Kinds among which these are chosen: more would have thousands of orders."""


def stock_ranks(
    problem: Problem, max_orders: int = MAX_ORDERS
) -> tuple[tuple[StockRanks, ...], bool]:
    """Return all sequences of groups in rank order, and whether they are all. A tensor-parallel
    group stays on one node."""
    kinds = [part for kind in kinds_of(problem) for part in _exchangeable(problem, kind)]
    numbers = {id(kind): number for number, kind in enumerate(kinds)}
    has_islands = len({node.machine for node in problem.nodes}) < len(problem.nodes)
    found = []
    is_complete = True
    for width in sorted({w for kind in kinds for w in kind.widths}):
        givers = [kind for kind in kinds if width in kind.widths]
        most = [kind.num_gpus // width for kind in givers]
        if _num_orders(givers, most) <= max_orders:
            orders = _orders(givers, [list(range(1, n + 1)) for n in most])
        else:
            # Whole nodes only, and the answer is not known to be complete.
            is_complete = False
            if _num_orders(givers, [1] * len(givers)) <= max_orders:
                orders = _orders(givers, [[n] for n in most])
            else:
                orders = _whole_orders(givers, width)
            orders = _once(_with_rounded(orders))
        # One object for each group, however many orders it is in.
        of_nodes = {
            (id(kind), index): equal_units(problem, node, width)
            for kind in givers
            for index, node in enumerate(kind.nodes)
        }
        for order in _once(map(_in_machines, orders)) if has_islands else orders:
            units: list[Unit] = []
            of_kinds: list[int] = []
            for kind, index, amount in order:
                own = of_nodes[id(kind), index][:amount]
                units += own
                of_kinds += [numbers[id(kind)]] * len(own)
            found.append(StockRanks(tuple(units), tuple(of_kinds)))
    return tuple(found), is_complete


def by_machine[T](items: Iterable[T], node_of: Callable[[T], Node]) -> tuple[T, ...]:
    """Return the items with those of a machine one after the other, where its first one stands:
    `torchrun` gives a machine consecutive ranks, whatever GPUs are in it."""
    found: dict[str, list[T]] = {}
    for item in items:
        found.setdefault(node_of(item).machine, []).append(item)
    return tuple(item for own in found.values() for item in own)


def _in_machines(order: _Order) -> _Order:
    """Return an order `by_machine`."""
    return by_machine(order, lambda entry: entry[0].nodes[entry[1]])


def _once(orders: Iterable[_Order]) -> Iterator[_Order]:
    """Yield each order once."""
    seen = set()
    for order in orders:
        key = tuple((id(kind), index, amount) for kind, index, amount in order)
        if key not in seen:
            seen.add(key)
            yield order


def _with_rounded(orders: Iterable[_Order]) -> Iterator[_Order]:
    """Yield each order, and its first groups up to the largest power of two: few grids divide nodes
    of 3, 5 or 7 GPUs, and fewer a batch."""
    for order in orders:
        yield order
        left = 1 << sum(amount for _, _, amount in order).bit_length() - 1
        taken = []
        for kind, index, amount in order:
            if left:
                taken.append((kind, index, min(amount, left)))
                left -= taken[-1][2]
        yield tuple(taken)


def _exchangeable(problem: Problem, kind: Kind) -> Iterator[Kind]:
    """Yield the nodes of a kind in groups with equal links to all other nodes."""
    groups: list[list[Node]] = []
    for node in kind.nodes:
        group = next((g for g in groups if _same_links(problem, g[0], node)), None)
        if group is None:
            groups.append([node])
        # Nodes of a kind whose links to all others are equal may change places.
        else:
            group.append(node)
    for group in groups:
        yield replace(kind, nodes=tuple(group))


def _same_links(problem: Problem, one: Node, other: Node) -> bool:
    cluster = problem.cluster
    if not cluster.has_nics:
        of_pairs, number = cluster.link_classes.of_pairs, cluster.link_classes.node_number
        a, b = number[one.name], number[other.name]
        same = (of_pairs[a] == of_pairs[b]) & (of_pairs[:, a] == of_pairs[:, b])
        # Links to the two themselves are compared apart.
        same[[a, b]] = of_pairs[a, b] == of_pairs[b, a]
        return bool(same.all())
    # With network cards the link of two GPUs is what counts, not that of the nodes.
    here, there = one.devices[0], other.devices[0]
    others = [n.devices[0] for n in problem.nodes if n.name not in (one.name, other.name)]
    link = cluster.link
    return link(here, there) == link(there, here) and all(
        link(here, c) == link(there, c) and link(c, here) == link(c, there) for c in others
    )


_Order = tuple[tuple[Kind, int, int], ...]
"""Nodes in order, each as kind, index of the node in the kind, and number of groups taken."""


def _num_orders(kinds: Sequence[Kind], amounts: Sequence[int]) -> int:
    """Bound the number of orders from above, by all sequences of the choices that nodes have.

    Args:
        kinds: of nodes.
        amounts: how many amounts a node of each kind may give.
    """
    num_nodes = sum(len(kind.nodes) for kind in kinds)
    num_orders, total = 1, 1
    choices = sum(amounts)
    for _ in range(num_nodes):
        num_orders *= choices
        total += num_orders
        # Without an end of the loop the number would have thousands of digits.
        if total > 10 * MAX_ORDERS:
            break
    return total


def _whole_orders(kinds: Sequence[Kind], width: int) -> Iterator[_Order]:
    """Yield orders of whole nodes, kind after kind: of every selection in `_selections` all nodes,
    and the largest power of two."""
    for chosen in _selections(kinds):
        for is_round in (False, True):
            yield tuple(
                (kind, index, kind.num_gpus // width)
                for kind in chosen
                # All nodes, or the largest power of two of them.
                for index in range(
                    1 << len(kind.nodes).bit_length() - 1 if is_round else len(kind.nodes)
                )
            )


def _selections(kinds: Sequence[Kind]) -> Iterator[tuple[Kind, ...]]:
    """Yield kinds of nodes in order: every selection of a few and every order of these, all kinds
    with GPUs of one type, and all kinds.

    Nodes of one GPU type at a hundred sites are a hundred kinds; the few are those with most GPUs.
    """
    by_size = sorted(range(len(kinds)), key=lambda i: -kinds[i].num_gpus * len(kinds[i].nodes))
    few = [kinds[i] for i in sorted(by_size[:_MAX_ORDERED_KINDS])]
    for size in range(1, min(len(few), _MAX_KINDS) + 1):
        yield from permutations(few, size)
    # What the selections of a few cannot hold.
    by_type: dict[str, list[Kind]] = {}
    for kind in kinds:
        by_type.setdefault(kind.nodes[0].gpu_type.name, []).append(kind)
    yield from map(tuple, by_type.values())
    yield tuple(kind for alike in by_type.values() for kind in alike)


def _orders(kinds: Sequence[Kind], amounts: Sequence[Sequence[int]]) -> Iterator[_Order]:
    """Yield every sequence of nodes with the amounts taken; like nodes come by number."""

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
