"""Which slabs a pool's nodes are divided into: column generation, and diving for whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, permutations, product
from math import prod

import numpy as np

from megatron_hetero.cluster.spec import Node
from megatron_hetero.planner.fill import FilledChain, Filler
from megatron_hetero.planner.kinds import cut
from megatron_hetero.planner.packing import pack
from megatron_hetero.planner.pricing import SlabPricer, SlabShape, StageTable
from megatron_hetero.planner.problem import Chain, Problem, Unit

_STEP_RATIO = 1.25
"""Slabs are generated for step times on a geometric grid, and shared by the times between."""
_MAX_ROUNDS = 3
_MAX_SCARCITY_ROUNDS = 3
_MIN_GAIN = 5e-3
"""A slab must bring this part of its pool's micro-batches more than its nodes do already."""
_MAX_ENUMERATED = 1000
"""Slabs of a pool that are made without asking for their worth."""
_MAX_KNOWN = 40
_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)


@dataclass(frozen=True)
class Slab:
    """A shape with its layers and quick times."""

    shape: SlabShape
    filled: FilledChain

    @property
    def max_node_layers(self) -> int:
        """Most layers that a node holds."""
        start, most = 0, 0
        for block in self.shape.blocks:
            end = start + len(block.widths)
            most = max(most, sum(self.filled.layers[start:end]))
            start = end
        return most

    def micro_batches(self, step_s: float) -> float:
        """How many it does in a step, as a real number; zero where none comes through."""
        after_first_s = step_s - self.filled.fill_s
        if after_first_s < 0:
            return 0.0
        return self.shape.num_replicas * (1 + after_first_s / self.filled.period_s)


Mix = tuple[tuple[Slab, int], ...]
"""Slabs, and how many of each."""


class PoolSlabs:
    """Slabs of one pool with at most `max_node_layers` layers on a node; remembers what it made.

    Args:
        kinds: the pool's kinds, as positions in the table's.
        capacity: nodes of each kind.
        replica_counts: equal replicas of a slab to try.
        known: slabs found for more layers on a node.
    """

    def __init__(
        self,
        table: StageTable,
        filler: Filler,
        kinds: Sequence[int],
        replica_counts: Sequence[int],
        max_node_layers: int,
        known: Iterable[SlabShape] = (),
    ) -> None:
        self.table = table
        self.filler = filler
        self.kinds = tuple(kinds)
        self.capacity = {kind: len(table.kinds[kind].nodes) for kind in kinds}
        self.max_node_layers = max_node_layers
        self.pricers = [
            SlabPricer(table, kinds, count, max_node_layers) for count in replica_counts
        ]
        self.slabs: dict[SlabShape, Slab | None] = {}
        self._generated: set[int] = set()
        known = list(known)
        for shape in known:
            self.slabs[shape] = self._slab(shape)
        if not known:
            self._enumerate()

    def mixes(self, step_s: float) -> list[Mix]:
        """The best division of the pool for a step time: over all slabs, and over those of each
        number of replicas alone."""
        slabs = self._usable()
        counts = sorted({slab.shape.num_replicas for slab in slabs})
        mixes = [self._solve(slabs, step_s)]
        if len(counts) > 1:
            for count in counts:
                alone = [slab for slab in slabs if slab.shape.num_replicas == count]
                mixes.append(self._solve(alone, step_s))
        return mixes

    def uniform_mixes(self, num_micro_batches: int) -> list[Mix]:
        """As many equal slabs as there is room for, and one alone; the soonest to end first."""
        ranked = []
        for index, slab in enumerate(self._usable()):
            most = min(self.capacity[k] // n for k, n in slab.shape.num_nodes().items())
            for count in {1, most}:
                share = -(-num_micro_batches // (count * slab.shape.num_replicas))
                ranked.append((slab.filled.quick_time_s(share), count, index, slab))
        ranked.sort(key=lambda entry: entry[:3])
        return [((slab, count),) for _, count, _, slab in ranked]

    def best_shapes(self, step_s: float) -> list[SlabShape]:
        """Of each number of replicas, the slabs that do most for the nodes that they take."""
        values = self._first_values(step_s)

        def worth(slab: Slab) -> float:
            nodes = slab.shape.num_nodes()
            return slab.micro_batches(step_s) / sum(values[kind] * n for kind, n in nodes.items())

        slabs = sorted(self._usable(), key=worth, reverse=True)
        counts = sorted({slab.shape.num_replicas for slab in slabs})
        return [
            slab.shape
            for count in counts
            for slab in [s for s in slabs if s.shape.num_replicas == count][:_MAX_KNOWN]
        ]

    def micro_batches(self, step_s: float) -> float:
        """Micro-batches of the whole pool in a step, by the slabs known, taken in fractions."""
        slabs = self._usable()
        return self._relaxed(slabs, step_s)[0] if slabs else 0.0

    def generate(self, step_s: float) -> bool:
        """Column generation at the grid's step time next above `step_s`; whether it was new."""
        level = int(np.ceil(np.log(step_s) / np.log(_STEP_RATIO)))
        if level in self._generated:
            return False
        self._generated.add(level)
        step_s = _STEP_RATIO**level
        values = self._first_values(step_s)
        for _ in range(_MAX_ROUNDS):
            slabs = self._usable()
            total = 0.0
            if slabs:
                total, values = self._relaxed(slabs, step_s)
            found = False
            for pricer in self.pricers:
                found |= self._price(pricer, step_s, values, _MIN_GAIN * total)
            if not found:
                break
        return True

    def _price(
        self, pricer: SlabPricer, step_s: float, values: Mapping[int, float], least: float
    ) -> bool:
        """Add the slabs worth more than their nodes; whether there were new ones.

        The path does not count nodes: kinds of which it took too many become dearer for it.
        """
        found = False
        values = dict(values)
        for _ in range(_MAX_SCARCITY_ROUNDS):
            scarce: set[int] = set()
            for shape in pricer.best(step_s, values, least):
                if shape not in self.slabs:
                    self.slabs[shape] = self._slab(shape)
                    found |= self.slabs[shape] is not None
                scarce |= {k for k, n in shape.num_nodes().items() if n > self.capacity[k]}
            if not scarce:
                break
            spread = max(values.values())
            values |= {k: 1.5 * values[k] + 0.05 * spread for k in scarce}
        return found

    def _enumerate(self) -> None:
        """Slabs of which the nodes are surely there: kinds one after the other, in all orders."""
        most = _MAX_ENUMERATED // max(len(self.pricers), sum(self.capacity.values()) // 2)
        for pricer in self.pricers:
            for shape in all_shapes(self.table, pricer, self.capacity, most):
                if shape not in self.slabs:
                    self.slabs[shape] = self._slab(shape)

    def _usable(self) -> list[Slab]:
        return [slab for slab in self.slabs.values() if slab is not None]

    def _slab(self, shape: SlabShape) -> Slab | None:
        """None where it takes more nodes than there are, or a stage's memory does not hold it."""
        if any(count > self.capacity[kind] for kind, count in shape.num_nodes().items()):
            return None
        if any(len(block.widths) > self.max_node_layers for block in shape.blocks):
            return None
        nodes = {kind: list(self.table.kinds[kind].nodes) for kind in self.kinds}
        chain = slab_chains(shape, nodes, self.table.problem)[0]
        most = tuple(
            self.max_node_layers // len(block.widths)
            for block in shape.blocks
            for _ in block.widths
        )
        filled = self.filler.chain(
            chain, self.table.rows, self.table.problem.num_micro_batches, most
        )
        return Slab(shape, filled) if filled.fits else None

    def _first_values(self, step_s: float) -> dict[int, float]:
        """Before any slab is known: a node's share of layers, were there no fill."""
        values = {}
        for kind in self.kinds:
            per_layer_s = min(
                width * self.table.times_s(kind, width)[1]
                for width in self.table.kinds[kind].widths
            )
            gpus = self.table.kinds[kind].num_gpus
            values[kind] = step_s * gpus / per_layer_s / self.table.problem.num_layers / 2
        return values

    def _relaxed(self, slabs: Sequence[Slab], step_s: float) -> tuple[float, dict[int, float]]:
        """Most micro-batches with slabs in fractions, and what a node of each kind adds."""
        worth = np.array([slab.micro_batches(step_s) for slab in slabs])
        capacity = np.array([self.capacity[kind] for kind in self.kinds], float)
        found = pack(worth, self._rows(slabs), capacity)
        values = {k: float(v) for k, v in zip(self.kinds, found.row_values, strict=True)}
        return found.worth, values

    def _solve(self, slabs: Sequence[Slab], step_s: float) -> Mix:
        """Whole slabs by diving: the whole part of the relaxed answer, then again for the nodes
        that are left; where there is no whole part, one more of the slab taken most."""
        counts: dict[int, int] = {}
        left = dict(self.capacity)
        while True:
            fitting = [
                (index, slab)
                for index, slab in enumerate(slabs)
                if slab.micro_batches(step_s) > 0
                and all(n <= left[kind] for kind, n in slab.shape.num_nodes().items())
            ]
            if not fitting:
                return tuple((slabs[index], counts[index]) for index in sorted(counts))
            taken = self._fractions([slab for _, slab in fitting], step_s, left)
            whole = [int(x + 1e-6) for x in taken]
            if not any(whole):
                whole[max(range(len(taken)), key=lambda i: (taken[i], -i))] = 1
            for (index, slab), count in zip(fitting, whole, strict=True):
                if count:
                    counts[index] = counts.get(index, 0) + count
                    for kind, n in slab.shape.num_nodes().items():
                        left[kind] -= n * count

    def _fractions(
        self, slabs: Sequence[Slab], step_s: float, left: Mapping[int, int]
    ) -> list[float]:
        """How many of each slab the relaxed programme takes of the nodes left."""
        worth = np.array([slab.micro_batches(step_s) for slab in slabs])
        rows = self._rows(slabs)
        worth = worth - 1e-6 * worth.max() * rows.sum(axis=0)  # of equals, those on fewer nodes
        capacity = np.array([left[kind] for kind in self.kinds], float)
        return [float(x) for x in pack(worth, rows, capacity).taken]

    def _rows(self, slabs: Sequence[Slab]) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        taken = [slab.shape.num_nodes() for slab in slabs]
        return np.array([[nodes.get(kind, 0) for nodes in taken] for kind in self.kinds], float)


def all_shapes(
    table: StageTable, pricer: SlabPricer, capacity: Mapping[int, int], most: int
) -> Iterator[SlabShape]:
    """Slabs in which each kind's nodes are neighbours and cut alike.

    Where that were more than `most`, the menus shrink: numbers of nodes to equal parts of all, then
    cuts to those of one width, then orders to larger memories first.
    """
    kinds = sorted({b.kind for b in pricer.blocks}, key=lambda k: _memory_key(table, k))
    counts = {k: list(range(capacity[k] + 1)) for k in kinds}
    menus = {k: [b for b in pricer.blocks if b.kind == k] for k in kinds}
    orders = list(permutations(kinds)) if len(kinds) <= 3 else [tuple(kinds), tuple(kinds[::-1])]

    def total() -> int:
        per_kind = [(len(counts[k]) - 1) * len(menus[k]) + 1 for k in kinds]
        return prod(per_kind) * len(orders)

    if total() > most:
        counts = {k: sorted({capacity[k] // x for x in _PARTS} | {0}) for k in kinds}
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
            shape = SlabShape(pricer.num_replicas, tuple(b for blocks in chosen for b in blocks))
            if 0 < shape.num_stages <= pricer.max_stages and shape not in seen:
                seen.add(shape)
                yield shape


def _plain_shapes(
    table: StageTable,
    pricer: SlabPricer,
    capacity: Mapping[int, int],
    orders: Sequence[tuple[int, ...]],
) -> Iterator[SlabShape]:
    """One width for all kinds (or the widest that they have below it), and equal parts of all."""
    for width in sorted({w for b in pricer.blocks for w in b.widths}):
        blocks = {}
        for block in pricer.blocks:
            gpus = sum(block.widths)
            if block.widths == cut(gpus, width, table.kinds[block.kind].widths):
                blocks[block.kind] = block
        for order, part in product(orders, _PARTS):
            chosen = tuple(
                blocks[k]
                for k in order
                if k in blocks
                for _ in range(capacity[k] // part // blocks[k].num_nodes)
            )
            shape = SlabShape(pricer.num_replicas, chosen)
            if 0 < shape.num_stages <= pricer.max_stages:
                yield shape


def _memory_key(table: StageTable, kind: int) -> tuple[int, int]:
    return -table.kinds[kind].node.gpu_type.memory_bytes, kind


def slab_chains(
    shape: SlabShape, nodes: Mapping[int, list[Node]], problem: Problem
) -> tuple[Chain, ...]:
    """The chains of a slab on the first nodes of each list, which are taken off it."""
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
