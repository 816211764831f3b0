"""The nodes of one pool: a bundle filled on them, and its exchange of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.columns.bundle_shapes import bundle_chains
from megatron_hetero.planner.columns.bundles import Bundle
from megatron_hetero.planner.columns.packing import Floats
from megatron_hetero.planner.columns.pricing import BundleShape, StageTable
from megatron_hetero.planner.completion.filled import placed_replica
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.units import Chain, Unit


class PoolNodes:
    """The nodes of one pool, with at most `max_node_layers` layers on a node.

    `kinds`: the pool's kinds, as positions in the table's.
    """

    def __init__(
        self, table: StageTable, own_flags: OwnFlags, kinds: Sequence[int], max_node_layers: int
    ) -> None:
        self.table = table
        self.own_flags = own_flags
        self.kinds = tuple(kinds)
        self.capacity = {kind: len(table.kinds[kind].nodes) for kind in kinds}
        self.max_node_layers = max_node_layers

    def nodes(self) -> Floats:
        """Return how many there are of each kind."""
        return np.array([self.capacity[kind] for kind in self.kinds], float)

    def bundle(self, shape: BundleShape) -> Bundle | None:
        """Return the filled bundle, or None if nodes or memory are short."""
        if any(count > self.capacity[kind] for kind, count in shape.num_nodes().items()):
            return None
        if any(len(block.widths) > self.max_node_layers for block in shape.blocks):
            return None
        chain = self._first_chain(shape)
        # [stage]: the limit of a node is divided among its stages.
        most = tuple(
            self.max_node_layers // len(block.widths)
            for block in shape.blocks
            for _ in block.widths
        )
        filled = self.own_flags.chain(chain, limits=most)
        return None if filled is None else Bundle(shape, filled)

    def _first_chain(self, shape: BundleShape) -> Chain:
        """Return the first chain that `bundle_chains` would make on the pool's nodes."""
        taken: dict[int, int] = {}
        chain: list[Unit] = []
        for block in shape.blocks:
            number = taken.get(block.kind, 0)
            taken[block.kind] = number + block.num_nodes
            node = self.table.kinds[block.kind].nodes[number].name
            chain += self.table.units(node, block.widths)
        return tuple(chain)

    def pass_s(self, bundle: Bundle) -> float:
        """Return one pass of the gradients between two copies of a bundle, as the price list has
        it; without room for a second one, by the layers of each node."""
        # Pools of one site that differ in the most layers of a node share what is priced.
        key = self.kinds, bundle.shape, bundle.filled.layers
        if key not in self.table.pass_s:
            self.table.pass_s[key] = self._priced_pass_s(bundle)
        return self.table.pass_s[key]

    def _priced_pass_s(self, bundle: Bundle) -> float:
        shape, problem = bundle.shape, self.table.problem
        if any(2 * count > self.capacity[kind] for kind, count in shape.num_nodes().items()):
            return max(
                layers * self.table.layer_sync_s(kind) for kind, layers in bundle.node_layers
            )
        nodes = {kind: list(self.table.kinds[kind].nodes) for kind in self.kinds}
        # Of each copy one replica: those side by side on a node exchange inside it.
        layers = bundle.filled.layers
        pair = [
            placed_replica(bundle_chains(shape, nodes, problem)[0], layers, 1) for _ in range(2)
        ]
        placement = Placement(tuple(pair))
        return problem.costs.sync_s(placement, problem.costs.vocab_rows(placement.widths))
