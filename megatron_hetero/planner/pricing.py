"""The best slabs for given prices of nodes: a shortest path over blocks, from the last stage on.

The dual prices of a linear programme (`columns`) say what a node is worth in micro-batches.  A slab
whose replicas end a step of `step_s` seconds, at one micro-batch each `period_s`, does
``num_replicas * (1 + (step_s - fill_s) / period_s)`` of them, and that is linear in the seconds of
its stages.  For every period of a grid, the dynamic programme finds the sequence of blocks that
covers all layers and is worth most beyond its nodes' prices.  A stage takes as many layers as the
period and its memory (which depends on its place, for the micro-batches in flight) allow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from megatron_hetero.cluster.spec import Device
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.planner.kinds import Block, Kind, blocks_of
from megatron_hetero.planner.problem import Problem

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_NUM_PERIODS = 20


class StageTable:
    """Times and memory limits of one stage by kind and width, priced once."""

    def __init__(self, problem: Problem, kinds: Sequence[Kind]) -> None:
        self.problem = problem
        self.kinds = kinds
        widths = sorted({width for kind in kinds for width in kind.widths})
        self.rows = problem.costs.vocab_rows(widths)
        self._max_layers: dict[tuple[int, int, bool, bool, int], int] = {}

    def times_s(self, kind: int, width: int) -> tuple[float, float, float]:
        """Seconds of the embedding, one layer and the head for one micro-batch."""
        pieces = self.problem.costs.pieces(self.kinds[kind].node, width, self.rows)
        return pieces.embedding.total_s, pieces.layer.total_s, pieces.head.total_s

    def max_layers(self, kind: int, width: int, first: bool, last: bool, place: int) -> int:
        """Layers that fit into a stage which is `place`-th from the end."""
        key = (kind, width, first, last, place)
        if key not in self._max_layers:
            in_flight = min(place, self.problem.num_micro_batches)
            memory = self.problem.costs.memory(
                self.kinds[kind].node, width, first, last, in_flight, self.rows
            )
            self._max_layers[key] = max(0, min(memory.max_layers, self.problem.num_layers))
        return self._max_layers[key]

    def hop_s(self, sender: int, receiver: int) -> float:
        """There and back between nodes of two kinds (two nodes of one where it has as many)."""
        nodes = self.kinds[sender].nodes
        one, other = nodes[0], self.kinds[receiver].nodes[-1]
        if one.name == other.name:
            return 0.0
        return self._round_trip_s(Device(one.name, 0), Device(other.name, 0))

    def inside_hop_s(self, kind: int) -> float:
        """There and back between two GPUs of a node."""
        name = self.kinds[kind].node.name
        return self._round_trip_s(Device(name, 0), Device(name, 1))

    def _round_trip_s(self, one: Device, other: Device) -> float:
        costs = self.problem.costs
        return costs.hop([one], [other]).total_s + costs.hop([other], [one]).total_s

    @cached_property
    def layer_sync_s(self) -> float:
        """Seconds of the gradient exchange for each layer that a node holds, between two replicas
        on different nodes (the slowest pair of kinds); zero with a single node."""
        problem = self.problem
        nodes = [node for kind in self.kinds for node in (kind.nodes[0], kind.nodes[-1])]
        names = sorted({node.name for node in nodes})
        if len(names) < 2 or max(problem.replica_counts(), default=1) < 2:
            return 0.0
        longest_s = 0.0
        for one, other in pairwise(names):
            pair = tuple(
                PlacedReplica((PlacedStage((Device(name, 0),), problem.num_layers),), 1)
                for name in (one, other)
            )
            longest_s = max(longest_s, problem.costs.sync_s(Placement(pair), self.rows))
        return longest_s / problem.num_layers

    @cached_property
    def periods_s(self) -> Floats:
        """Periods worth trying: from one layer on the fastest stage to all on the slowest."""
        layer_s = [self.times_s(k, w)[1] for k, kind in enumerate(self.kinds) for w in kind.widths]
        longest_s = self.problem.num_layers * max(layer_s)
        return np.geomspace(min(layer_s), longest_s, _NUM_PERIODS)


@dataclass(frozen=True)
class SlabShape:
    """`num_replicas` equal replicas side by side on blocks of whole nodes, first stage first."""

    num_replicas: int
    blocks: tuple[Block, ...]

    @property
    def num_stages(self) -> int:
        """Pipeline depth."""
        return sum(len(block.widths) for block in self.blocks)

    def num_nodes(self) -> Mapping[int, int]:
        """Nodes that it takes of each kind."""
        taken: dict[int, int] = {}
        for block in self.blocks:
            taken[block.kind] = taken.get(block.kind, 0) + block.num_nodes
        return taken


class SlabPricer:
    """Finds slabs of `num_replicas` replicas with at most `max_node_layers` layers on a node."""

    def __init__(
        self, table: StageTable, kinds: Sequence[int], num_replicas: int, max_node_layers: int
    ) -> None:
        self.table = table
        self.num_replicas = num_replicas
        problem = table.problem
        self.num_layers = problem.num_layers
        self.max_stages = problem.max_stages()
        self.periods_s = table.periods_s
        self.blocks = [
            Block(kinds[block.kind], block.num_nodes, block.widths)
            for block in blocks_of([table.kinds[k] for k in kinds], num_replicas)
            if len(block.widths) <= min(max_node_layers, self.max_stages)
        ]
        sites = sorted({table.kinds[block.kind].node.site for block in self.blocks})
        self.sites = [sites.index(table.kinds[block.kind].node.site) for block in self.blocks]
        self.num_sites = len(sites)
        self.max_node_layers = max_node_layers
        self._held: dict[tuple[int, int, bool], tuple[Ints, Floats] | None] = {}
        self._hops_s = self._prices_of_hops()

    def _prices_of_hops(self) -> Floats:
        """Round trip from a block of a site to the first block of another (or its own) site."""
        hops_s = np.zeros((self.num_sites, len(self.blocks)))
        for site in range(self.num_sites):
            there = [b for s, b in zip(self.sites, self.blocks, strict=True) if s == site]
            for i, block in enumerate(self.blocks):
                hops_s[site, i] = min(self.table.hop_s(block.kind, b.kind) for b in there)
        return hops_s

    def held(self, block: int, place: int, first: bool) -> tuple[Ints, Floats] | None:
        """Layers of a block whose last stage is `place`-th from the end, and its seconds for a
        micro-batch without those layers, both for every period; None where no layer is held.

        Layers below zero say that a stage holds none.
        """
        key = (block, place, first)
        if key not in self._held:
            self._held[key] = self._hold(*key)
        return self._held[key]

    def _hold(self, index: int, place: int, first: bool) -> tuple[Ints, Floats] | None:
        block, table = self.blocks[index], self.table
        most = self.max_node_layers // len(block.widths)
        layers = np.zeros(len(self.periods_s), np.int64)
        fails = np.zeros(len(self.periods_s), bool)
        base_s = 0.0
        for i, width in enumerate(reversed(block.widths)):
            is_first = first and i == len(block.widths) - 1
            is_last = place + i == 1
            embedding_s, layer_s, head_s = table.times_s(block.kind, width)
            ends_s = embedding_s * is_first + head_s * is_last
            fit = table.max_layers(block.kind, width, is_first, is_last, place + i)
            by_time = np.floor((self.periods_s - ends_s) / layer_s + 1e-9).astype(np.int64)
            held = np.minimum(by_time, min(fit, most))
            fails |= held < 1
            layers += held
            base_s += ends_s
        if fails.all():
            return None
        base_s += (len(block.widths) - 1) * self._inside_s(block)
        return np.where(fails, -1, np.minimum(layers, self.num_layers)), np.full(
            len(self.periods_s), base_s
        )

    def _inside_s(self, block: Block) -> float:
        return self.table.inside_hop_s(block.kind) if len(block.widths) > 1 else 0.0

    def best(
        self, step_s: float, node_values: Mapping[int, float], slab_value: float = 0.0
    ) -> list[SlabShape]:
        """Slabs worth more micro-batches than their nodes' values, the best of each period.

        Args:
            node_values: micro-batches that a node of each kind is worth.
            slab_value: micro-batches that any slab costs beside its nodes.
        """
        chosen = np.flatnonzero(self.periods_s <= step_s)
        if not self.blocks or not len(chosen):
            return []
        paths = _Paths(self, chosen, step_s, node_values)
        found: dict[SlabShape, float] = {}
        for column in range(len(chosen)):
            shape, worth = paths.shape(column)
            if shape is not None and worth > slab_value:
                found[shape] = max(worth, found.get(shape, 0.0))
        return sorted(found, key=lambda shape: (-found[shape], repr(shape)))


class _Paths:
    """The dynamic programme of `SlabPricer.best`: seconds over periods plus prices, all per
    replica, of the cheapest last stages; arrays have shape [period, layer]."""

    def __init__(
        self,
        pricer: SlabPricer,
        chosen: Ints,
        step_s: float,
        node_values: Mapping[int, float],
    ) -> None:
        self.pricer = pricer
        self.chosen = chosen
        self.step_s = step_s
        self.periods_s = pricer.periods_s[chosen]
        self.prices = [
            node_values.get(b.kind, 0.0) * b.num_nodes / pricer.num_replicas for b in pricer.blocks
        ]
        self.layer_s = [
            float(np.mean([pricer.table.times_s(b.kind, w)[1] for w in b.widths]))
            for b in pricer.blocks
        ]
        num_layers = pricer.num_layers
        self.layers = np.arange(num_layers)
        shape = (len(chosen), num_layers)
        self.start = np.full(shape, np.inf)
        self.start[:, 0] = 0.0
        self.cost: dict[tuple[int, int], Floats] = {}
        self.by: dict[tuple[int, int], Ints] = {}
        """Block and site before it, as block * num_sites + site."""
        self.end_cost = np.full(len(chosen), np.inf)
        self.end = np.zeros((len(chosen), 4), np.int64)
        """Stages after the first block, its index, the site after it, and the layers after it."""
        self._search()

    def _search(self) -> None:
        pricer = self.pricer
        for num_stages in range(pricer.max_stages):
            befores = self._befores(num_stages)
            if not befores:
                continue
            for index, block in enumerate(pricer.blocks):
                if num_stages + len(block.widths) > pricer.max_stages:
                    continue
                if num_stages == 0 and not pricer.table.kinds[block.kind].may_end:
                    continue
                self._extend(num_stages, index, befores)
            for site, _ in befores:
                self.cost.pop((num_stages, site), None)

    def _befores(self, num_stages: int) -> list[tuple[int, Floats]]:
        if num_stages == 0:
            return [(0, self.start)]
        sites = range(self.pricer.num_sites)
        return [(s, self.cost[num_stages, s]) for s in sites if (num_stages, s) in self.cost]

    def _extend(self, num_stages: int, index: int, befores: list[tuple[int, Floats]]) -> None:
        pricer, block = self.pricer, self.pricer.blocks[index]
        for site, before in befores:
            hop_s = pricer._hops_s[site, index] if num_stages else 0.0
            if pricer.table.kinds[block.kind].may_start:
                self._finish(num_stages, index, site, before, hop_s)
            held = pricer.held(index, num_stages + 1, False)
            if held is None:
                continue
            layers, base_s = held[0][self.chosen], held[1][self.chosen]
            seconds = layers * self.layer_s[index] + base_s + hop_s
            added = self.prices[index] + seconds / self.periods_s
            source = self.layers[None, :] - layers[:, None]
            allowed = (source >= 0) & (layers[:, None] > 0)
            cost = np.take_along_axis(before, np.where(allowed, source, 0), axis=1)
            cost = np.where(allowed, cost + added[:, None], np.inf)
            if not np.isfinite(cost).any():
                continue
            key = (num_stages + len(block.widths), pricer.sites[index])
            if key not in self.cost:
                self.cost[key] = np.full(before.shape, np.inf)
                self.by[key] = np.zeros(before.shape, np.int64)
            better = cost < self.cost[key]
            np.copyto(self.cost[key], cost, where=better)
            np.copyto(self.by[key], index * pricer.num_sites + site, where=better)

    def _finish(self, num_stages: int, index: int, site: int, before: Floats, hop_s: float) -> None:
        """Close with a block that holds the first layers."""
        pricer = self.pricer
        held = pricer.held(index, num_stages + 1, True)
        if held is None:
            return
        most, base_s = held[0][self.chosen], held[1][self.chosen]
        start = max(0, pricer.num_layers - int(most.max()))
        left = pricer.num_layers - self.layers[None, start:]
        allowed = (left <= most[:, None]) & (left >= len(pricer.blocks[index].widths))
        allowed &= np.isfinite(before[:, start:])
        if not allowed.any():
            return
        seconds = left * self.layer_s[index] + (base_s + hop_s)[:, None]
        cost = before[:, start:] + self.prices[index] + seconds / self.periods_s[:, None]
        cost = np.where(allowed, cost, np.inf)
        layer = np.argmin(cost, axis=1)
        least = cost[np.arange(len(cost)), layer]
        layer = layer + start
        better = least < self.end_cost
        self.end_cost = np.where(better, least, self.end_cost)
        ends = np.stack(np.broadcast_arrays(num_stages, index, site, layer), axis=1)
        self.end = np.where(better[:, None], ends, self.end)

    def shape(self, column: int) -> tuple[SlabShape | None, float]:
        """The best slab of a period and the micro-batches that it is worth beyond its nodes."""
        pricer = self.pricer
        if not np.isfinite(self.end_cost[column]):
            return None, 0.0
        worth = 1 + self.step_s / self.periods_s[column] - self.end_cost[column]
        num_stages, index, site, layer = (int(value) for value in self.end[column])
        blocks = [pricer.blocks[index]]
        while num_stages:
            index, before = divmod(int(self.by[num_stages, site][column, layer]), pricer.num_sites)
            blocks.append(pricer.blocks[index])
            held = pricer.held(index, num_stages - len(pricer.blocks[index].widths) + 1, False)
            if held is None:
                raise AssertionError("a path leads through a block that holds nothing")
            layer -= int(held[0][self.chosen[column]])
            num_stages, site = num_stages - len(pricer.blocks[index].widths), before
        return SlabShape(pricer.num_replicas, tuple(blocks)), float(worth) * pricer.num_replicas
