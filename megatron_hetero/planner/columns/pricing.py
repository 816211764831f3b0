"""The best bundles for given prices of nodes: a shortest path over blocks, from the last stage on.

The dual prices of a linear programme (`columns`) say what a node is worth in micro-batches.  A
bundle whose replicas end a step of `step_s` seconds, at one micro-batch each `period_s`, does
``num_replicas * (1 + (step_s - fill_s) / period_s)`` of them, and that is linear in the seconds of
its stages.  For every period of a grid, the dynamic programme finds the sequence of blocks that
covers all layers and is worth most beyond its nodes' prices.  A stage takes as many layers as the
period and its memory (which depends on its place, for the micro-batches in flight) allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.hashed import hashed_once, value
from megatron_hetero.planner.columns.bundle_paths import (
    BlockMenu,
    BundlePaths,
    Floats,
    HeldLayers,
    Ints,
    Shorts,
)
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.kinds import Kind, NodeBlock, blocks_of
from megatron_hetero.planner.units import Unit
from megatron_hetero.rounding import ROUNDING

_NUM_PERIODS = 20


class StageTable:
    """Times and memory limits of one stage by kind and width, priced once."""

    def __init__(self, problem: Problem, kinds: Sequence[Kind]) -> None:
        self.problem = problem
        self.kinds = kinds
        widths = sorted({width for kind in kinds for width in kind.widths})
        self.rows = problem.costs.vocab_rows(widths)
        self._max_layers: dict[tuple[int, int, bool, bool, int], int] = {}
        self._fitting: dict[tuple[int, int, bool], Ints] = {}
        self._held: dict[tuple[NodeBlock, bool, int], tuple[Shorts, Floats]] = {}
        self._units: dict[tuple[str, tuple[int, ...]], tuple[Unit, ...]] = {}
        self._layer_sync_s: dict[int, float] = {}
        self._pair_sync_s: dict[int, float] = {}
        self.pass_s: dict[tuple[tuple[int, ...], BundleShape, tuple[int, ...]], float] = {}
        """Exchange between two copies of a bundle, by the kinds of the pool and the layers."""
        self._alike = _first_alike(kinds)

    def units(self, node: str, widths: tuple[int, ...]) -> tuple[Unit, ...]:
        """Return a node's first GPUs in groups of some widths: one object for all chains, which
        are many thousands."""
        key = node, widths
        if key not in self._units:
            gpus, ends = self.problem.gpus[node], accumulate(widths)
            self._units[key] = tuple(
                Unit(node, gpus[end - width : end])
                for width, end in zip(widths, ends, strict=True)
            )
        return self._units[key]

    def times_s(self, kind: int, width: int) -> tuple[float, float, float]:
        """Return seconds of the embedding, a layer and the head for one micro-batch."""
        pieces = self.problem.costs.pieces(self.kinds[kind].node, width, self.rows)
        return pieces.embedding.total_s, pieces.layer.total_s, pieces.head.total_s

    def max_layers(self, kind: int, width: int, first: bool, last: bool, place: int) -> int:
        """Return the number of layers that fit into the `place`-th stage from the end."""
        key = (kind, width, first, last, place)
        if key not in self._max_layers:
            in_flight = min(place, self.problem.num_micro_batches)
            memory = self.problem.costs.memory(
                self.kinds[kind].node, width, first, last, in_flight, self.rows
            )
            self._max_layers[key] = max(0, min(memory.max_layers, self.problem.num_layers))
        return self._max_layers[key]

    def held(self, block: NodeBlock, first: bool, max_node_layers: int) -> tuple[Shorts, Floats]:
        """Return the layers a block holds [stages behind the block, period] (zero if none), and its
        seconds per micro-batch without layers [stages behind the block].

        Args:
            first: whether its first stage holds the embedding.
        """
        # Sites do not matter for times and memory: the first alike kind stands for all.
        key = (replace(block, kind=self._alike[block.kind]), first, max_node_layers)
        if key not in self._held:
            self._held[key] = self._hold(*key)
        return self._held[key]

    def _hold(self, block: NodeBlock, first: bool, max_node_layers: int) -> tuple[Shorts, Floats]:
        depth = self.problem.max_stages()
        most = max_node_layers // len(block.widths)
        layers = np.zeros((depth, len(self.periods_s)), np.int64)
        room = max(depth - len(block.widths) + 1, 0)  # behind more stages it were too long
        holds = np.ones((room, len(self.periods_s)), bool)
        base_s = np.zeros(depth)
        # From the block's last stage to its first; stage i has i more of the block behind it.
        for i, width in enumerate(reversed(block.widths)):
            is_first = first and i == len(block.widths) - 1
            fitting = np.minimum(self._stage_layers(block.kind, width, is_first), most)
            # The stage's row for r stages behind the block is row r + i of its own table.
            fitting = fitting[i : i + room]
            holds &= fitting >= 1
            layers[:room] += fitting
            embedding_s, _, head_s = self.times_s(block.kind, width)
            base_s += embedding_s * is_first
            # Only with nothing behind the block is its last stage the pipeline's last.
            base_s[0] += head_s * (i == 0)
        if len(block.widths) > 1:
            base_s += (len(block.widths) - 1) * self.inside_hop_s(block.kind)
        # A block holds nothing if any of its stages cannot hold a single layer.
        layers[:room] = np.where(holds, np.minimum(layers[:room], self.problem.num_layers), 0)
        return layers.astype(np.int16), base_s

    def _stage_layers(self, kind: int, width: int, first: bool) -> Ints:
        """Return layers of a stage by period and memory, shape [stages behind it, period]."""
        key = (kind, width, first)
        if key not in self._fitting:
            embedding_s, layer_s, head_s = self.times_s(kind, width)
            rows = []
            for place in range(1, self.problem.max_stages() + 1):
                last = place == 1
                ends_s = embedding_s * first + head_s * last
                # Layers by time, then by memory with as many in flight as the place has.
                by_time = np.floor((self.periods_s - ends_s) / layer_s + ROUNDING).astype(np.int64)
                rows.append(np.minimum(by_time, self.max_layers(kind, width, first, last, place)))
            self._fitting[key] = np.array(rows)
        return self._fitting[key]

    def gpu_layer_s(self, kind: int) -> float:
        """Return the least GPU-seconds of a layer on this kind."""
        return min(w * self.times_s(kind, w)[1] for w in self.kinds[kind].widths)

    def hop_s(self, sender: int, receiver: int) -> float:
        """Return seconds there and back between nodes of two kinds (two nodes of a single kind if
        possible)."""
        # Two nodes of one kind, where the kind has two.
        nodes = self.kinds[sender].nodes
        one, other = nodes[0], self.kinds[receiver].nodes[-1]
        if one.name == other.name:
            return 0.0
        return self._round_trip_s(one.devices[0], other.devices[0])

    def inside_hop_s(self, kind: int) -> float:
        """Return there and back between two GPUs of a node."""
        devices = self.kinds[kind].node.devices
        return self._round_trip_s(devices[0], devices[-1])

    def _round_trip_s(self, one: Device, other: Device) -> float:
        costs = self.problem.costs
        return costs.hop([one], [other]).total_s + costs.hop([other], [one]).total_s

    def layer_sync_s(self, kind: int) -> float:
        """Return seconds of the gradient exchange for each layer on a node of this kind, in a ring
        with neighbours of the same site; zero without neighbours."""
        if kind not in self._layer_sync_s:
            own = self.kinds[kind].nodes
            there = [k.nodes[0] for k in self.kinds if k.node.site == own[0].site]
            others = {node.name for node in (*there, own[-1])} - {own[0].name}
            self._layer_sync_s[kind] = max(
                (self.pair_sync_s(own[0].name, name) for name in others), default=0.0
            )
        return self._layer_sync_s[kind]

    def pair_sync_s(self, one: str, other: str) -> float:
        """Return seconds of the gradient exchange between two replicas on two nodes, for each
        layer."""
        problem = self.problem
        counts = problem.replica_counts()  # of thousands of GPUs: not to be gone through
        if not counts or counts[-1] < 2:
            # Without a second replica nothing is exchanged.
            return 0.0
        link = problem.likeness.hop(one, other)
        if link not in self._pair_sync_s:
            nodes = problem.cluster.node_by_name
            # A replica of a single GPU on each node: the exchange of all layers, over their number.
            pair = tuple(
                PlacedReplica((PlacedStage(nodes[name].devices[:1], problem.num_layers),), 1)
                for name in (one, other)
            )
            total_s = problem.costs.sync_s(Placement(pair), self.rows)
            self._pair_sync_s[link] = total_s / problem.num_layers
        return self._pair_sync_s[link]

    @cached_property
    def periods_s(self) -> Floats:
        """Periods worth trying: from one layer on the fastest stage to all on the slowest."""
        layer_s = [self.times_s(k, w)[1] for k in set(self._alike) for w in self.kinds[k].widths]
        longest_s = self.problem.num_layers * max(layer_s)
        return np.geomspace(min(layer_s), longest_s, _NUM_PERIODS)


def _first_alike(kinds: Sequence[Kind]) -> list[int]:
    """Return for each kind the first kind with the same times and memory; sites do not count."""
    first: dict[tuple[object, ...], int] = {}
    return [first.setdefault(kind.machine, index) for index, kind in enumerate(kinds)]


@hashed_once
@value(frozen=True)
class BundleShape:
    """`num_replicas` equal replicas side by side on blocks of whole nodes, first stage first."""

    num_replicas: int
    blocks: tuple[NodeBlock, ...]

    @property
    def num_stages(self) -> int:
        """Pipeline depth."""
        return sum(len(block.widths) for block in self.blocks)

    def num_nodes(self) -> Mapping[int, int]:
        """Return the nodes taken of each kind."""
        taken: dict[int, int] = {}
        for block in self.blocks:
            taken[block.kind] = taken.get(block.kind, 0) + block.num_nodes
        return taken


class BundlePricer:
    """Finds bundles of `num_replicas` replicas with at most `max_node_layers` layers on a node."""

    def __init__(
        self, table: StageTable, kinds: Sequence[int], num_replicas: int, max_node_layers: int
    ) -> None:
        self.table = table
        self.num_replicas = num_replicas
        self.max_stages = table.problem.max_stages()
        self.blocks = tuple(
            NodeBlock(kinds[block.kind], block.num_nodes, block.widths)
            for block in blocks_of([table.kinds[k] for k in kinds], num_replicas)
            if len(block.widths) <= min(max_node_layers, self.max_stages)
        )
        self.words = {block: repr(block) for block in self.blocks}
        self.max_node_layers = max_node_layers

    @cached_property
    def menu(self) -> BlockMenu:
        """The blocks as arrays."""
        table, kinds = self.table, [self.table.kinds[block.kind] for block in self.blocks]
        of_pool = sorted({block.kind for block in self.blocks})
        # The nearest kind of the pool: which kind follows is not known here.
        hops_s = [min(table.hop_s(b.kind, kind) for kind in of_pool) for b in self.blocks]
        layer_s = [
            float(np.mean([table.times_s(b.kind, w)[1] for w in b.widths])) for b in self.blocks
        ]
        return BlockMenu(
            self.blocks,
            table.problem.num_layers,
            table.periods_s,
            np.array(layer_s),
            self._held(False),
            self._held(True),
            np.array(hops_s),
            np.array([kind.may_start for kind in kinds], bool),
            np.array([kind.may_end for kind in kinds], bool),
        )

    def close(self) -> None:
        """Forget the arrays of the blocks, which are made anew where they are asked for."""
        self.__dict__.pop("menu", None)

    def _held(self, first: bool) -> HeldLayers:
        shape = (self.max_stages, len(self.blocks), len(self.table.periods_s))
        layers, base_s = np.zeros(shape, np.int16), np.zeros(shape[:2])
        for index, block in enumerate(self.blocks):
            layers[:, index], base_s[:, index] = self.table.held(block, first, self.max_node_layers)
        return HeldLayers(layers, base_s)

    def best(
        self, step_s: float, node_values: Mapping[int, float], bundle_value: float = 0.0
    ) -> list[BundleShape]:
        """Return bundles worth more micro-batches than their nodes, the best of each period.

        Args:
            node_values: micro-batches that a node of each kind is worth.
            bundle_value: micro-batches that any bundle costs beside its nodes.
        """
        if not self.blocks:
            return []
        values = [node_values.get(b.kind, 0.0) * b.num_nodes for b in self.blocks]
        # The price of a node is shared by the replicas side by side on it.
        prices = np.array(values) / self.num_replicas
        paths = BundlePaths(self.menu, prices, step_s, bundle_value / self.num_replicas)
        # Worth is what a pipeline does beyond its cost, for all replicas of the bundle.
        worths = (1 + step_s / paths.periods_s - paths.end_cost) * self.num_replicas
        found: dict[BundleShape, float] = {}
        for period, worth in enumerate(worths):
            if worth > bundle_value:
                shape = BundleShape(self.num_replicas, paths.blocks(period))
                found[shape] = max(worth, found.get(shape, 0.0))
        return sorted(found, key=lambda shape: (-found[shape], repr(shape)))
