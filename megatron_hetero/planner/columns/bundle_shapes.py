"""Bundles made without prices of nodes, and the chains of a bundle on its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape, StageTable
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.kinds import NodeBlock, cut, ladder
from megatron_hetero.planner.shapes.order import some_orders
from megatron_hetero.planner.units import Chain, Unit


def plain_shapes(
    table: StageTable, pricer: BundlePricer, capacity: Mapping[int, int]
) -> list[BundleShape]:
    """Return bundles of one width for all kinds (or the widest possible width below), on equal
    parts of the nodes of each, in a few orders of the kinds.

    Args:
        capacity: nodes of each kind.
    """
    found: dict[BundleShape, None] = {}
    memory = {k: table.kinds[k].node.gpu_type.memory_bytes for k in capacity}
    kinds = sorted({block.kind for block in pricer.blocks}, key=lambda k: (-memory[k], k))
    for width in sorted({w for b in pricer.blocks for w in b.widths}):
        blocks = {}
        for block in pricer.blocks:
            gpus = sum(block.widths)
            if block.widths == cut(gpus, width, table.kinds[block.kind].widths):
                # Only blocks that are cut into this width, or into the widest possible one below.
                blocks[block.kind] = block
        # Equal parts of all nodes: half of them, a third and so on, in a few orders.
        for order, part in product(some_orders(kinds), ladder(max(capacity.values()))):
            chosen = tuple(
                blocks[k]
                for k in order
                if k in blocks
                for _ in range(capacity[k] // part // blocks[k].num_nodes)
            )
            shape = BundleShape(pricer.num_replicas, chosen)
            if 0 < shape.num_stages <= pricer.max_stages:
                found[shape] = None
    return sorted(found, key=repr)


def shapes_of_one_kind(
    table: StageTable, pricer: BundlePricer, capacity: Mapping[int, int]
) -> list[BundleShape]:
    """Return bundles of one width on nodes of one kind: for each number of copies that the kind has
    room for, the longest.

    Args:
        capacity: nodes of each kind.
    """
    found: list[BundleShape] = []
    for block in pricer.blocks:
        if not is_plain(table, block):
            continue
        most = capacity[block.kind] // block.num_nodes
        longest = {most // number: number for number in range(1, most + 1)}
        found += [BundleShape(pricer.num_replicas, (block,) * n) for n in longest.values()]
    return [shape for shape in found if shape.num_stages <= pricer.max_stages]


def is_plain(table: StageTable, block: NodeBlock) -> bool:
    """Return whether a block is cut into groups of one width, and a rest."""
    widths = block.widths
    return widths == cut(sum(widths), widths[0], table.kinds[block.kind].widths)


def bundle_chains(
    shape: BundleShape, nodes: Mapping[int, list[Node]], problem: Problem
) -> tuple[Chain, ...]:
    """Return the chains of a bundle on the first nodes of each list, and take these nodes off the
    list."""
    chains: list[list[Unit]] = [[] for _ in range(shape.num_replicas)]
    for block in shape.blocks:
        taken = [nodes[block.kind].pop(0) for _ in range(block.num_nodes)]
        # Replicas of a block are spread over its nodes evenly, the last node may have fewer.
        on_each = -(-shape.num_replicas // len(taken))
        gpus = sum(block.widths)
        for replica, chain in enumerate(chains):
            node = taken[replica // on_each].name
            start = replica % on_each * gpus
            for width in block.widths:
                chain.append(Unit(node, problem.gpus[node][start : start + width]))
                start += width
    return tuple(tuple(chain) for chain in chains)
