"""Bundles that are made without prices of nodes, and the chains of a bundle on its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, product
from math import prod

from megatron_hetero.cluster.spec import Node
from megatron_hetero.planner.columns.kinds import cut, ladder
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape, StageTable
from megatron_hetero.planner.completion.order import some_orders
from megatron_hetero.planner.problem import Chain, Problem, Unit


def all_shapes(
    table: StageTable, pricer: BundlePricer, capacity: Mapping[int, int], most: int
) -> Iterator[BundleShape]:
    """Yield bundles in which each kind's nodes are neighbours and cut alike.

    Where that were more than `most`, the menus shrink: numbers of nodes to equal parts of all, then
    cuts to those of one width, then orders to larger memories first.
    """
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
    seen = set(_plain_shapes(table, pricer, capacity, orders))
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


def _plain_shapes(
    table: StageTable,
    pricer: BundlePricer,
    capacity: Mapping[int, int],
    orders: Sequence[tuple[int, ...]],
) -> Iterator[BundleShape]:
    """Yield one width for all kinds (or the widest that they have below it), and equal parts of
    all."""
    for width in sorted({w for b in pricer.blocks for w in b.widths}):
        blocks = {}
        for block in pricer.blocks:
            gpus = sum(block.widths)
            if block.widths == cut(gpus, width, table.kinds[block.kind].widths):
                blocks[block.kind] = block
        for order, part in product(orders, ladder(max(capacity.values()))):
            chosen = tuple(
                blocks[k]
                for k in order
                if k in blocks
                for _ in range(capacity[k] // part // blocks[k].num_nodes)
            )
            shape = BundleShape(pricer.num_replicas, chosen)
            if 0 < shape.num_stages <= pricer.max_stages:
                yield shape


def _equal_parts(num_nodes: int) -> set[int]:
    """Return the nodes of all, a half, a third, a quarter, a sixth, ... of them."""
    return {num_nodes // part for part in ladder(num_nodes)}


def _memory_key(table: StageTable, kind: int) -> tuple[int, int]:
    return -table.kinds[kind].node.gpu_type.memory_bytes, kind


def bundle_chains(
    shape: BundleShape, nodes: Mapping[int, list[Node]], problem: Problem
) -> tuple[Chain, ...]:
    """Return the chains of a bundle on the first nodes of each list, which are taken off it."""
    chains: list[list[Unit]] = [[] for _ in range(shape.num_replicas)]
    for block in shape.blocks:
        taken = [nodes[block.kind].pop(0) for _ in range(block.num_nodes)]
        on_each = -(-shape.num_replicas // len(taken))
        gpus = sum(block.widths)
        for replica, chain in enumerate(chains):
            node = taken[replica // on_each].name
            start = replica % on_each * gpus
            for width in block.widths:
                chain.append(Unit(node, problem.gpus[node][start : start + width]))
                start += width
    return tuple(tuple(chain) for chain in chains)
