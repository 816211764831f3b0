"""Column generation that begins with every bundle whose kinds of nodes are neighbours.

Referees have no search over structures behind it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, product
from math import prod

from megatron_hetero.planner.columns.bundle_shapes import FirstShapes, plain_shapes
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape, StageTable
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.shapes.kinds import ladder
from megatron_hetero.planner.shapes.order import some_orders

_MAX_SHAPES, _FEW_NODES = 1000, 8
"""Bundles of a pool for each number of replicas, times half of its nodes if these are not few."""


def all_shapes(
    table: StageTable, pricer: BundlePricer, capacity: Mapping[int, int]
) -> Iterator[BundleShape]:
    """Yield the plain bundles, and all in which each kind's nodes are neighbours and cut alike.

    Where that were more than a limit, the menus shrink: numbers of nodes to equal parts of all,
    then cuts to those of one width, then orders to larger memories first.
    """
    most = 2 * _MAX_SHAPES // max(_FEW_NODES, sum(capacity.values()))
    kinds = sorted({b.kind for b in pricer.blocks}, key=lambda k: _memory_key(table, k))
    counts = {k: list(range(capacity[k] + 1)) for k in kinds}
    menus = {k: [b for b in pricer.blocks if b.kind == k] for k in kinds}
    orders = [tuple(order) for order in some_orders(kinds)]

    def total() -> int:
        per_kind = [(len(counts[k]) - 1) * len(menus[k]) + 1 for k in kinds]
        return prod(per_kind) * len(orders)

    if total() > most:
        counts = {k: [0, *sorted(_equal_parts(capacity[k]))] for k in kinds}
    if total() > most:
        menus = {k: [b for b in menu if len(set(b.widths)) == 1] for k, menu in menus.items()}
    if total() > most:
        orders = orders[:1]
    if total() > most:
        counts = {k: sorted({0, 1, capacity[k]}) for k in kinds}
    seen = set(plain_shapes(table, pricer, capacity))
    yield from sorted(seen, key=repr)
    stride = -(-total() // most)
    for order in orders:
        choices = [
            [()] + [(block,) * (n // block.num_nodes) for n in counts[k] if n for block in menus[k]]
            for k in order
        ]
        for chosen in islice(product(*choices), 0, None, stride):
            shape = BundleShape(pricer.num_replicas, tuple(b for blocks in chosen for b in blocks))
            if 0 < shape.num_stages <= pricer.max_stages and shape not in seen:
                seen.add(shape)
                yield shape


def _equal_parts(num_nodes: int) -> set[int]:
    """Return the nodes of all, a half, a third, a quarter, a sixth, ... of them."""
    return {num_nodes // part for part in ladder(num_nodes)}


def _memory_key(table: StageTable, kind: int) -> tuple[int, int]:
    return -table.kinds[kind].node.gpu_type.memory_bytes, kind


class AllColumns(Columns):
    """Columns that begins with all of these."""

    first_shapes: FirstShapes = staticmethod(all_shapes)
