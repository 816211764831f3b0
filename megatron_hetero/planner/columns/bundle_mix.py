"""The bundles that a pool's nodes are divided into.

Column generation finds fractions of bundles.  Diving makes them whole: it keeps the whole parts and
solves again for the nodes that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from megatron_hetero.planner.columns.bundle_shapes import plain_shapes
from megatron_hetero.planner.columns.bundles import Bundle, BundleColumns, Mix
from megatron_hetero.planner.columns.equal_copies import (
    numbers_of_copies,
    soonest_of_fewer_kinds,
    soonest_of_several_kinds,
)
from megatron_hetero.planner.columns.equal_shapes import MAX_LIKELY
from megatron_hetero.planner.columns.packing import Floats, pack
from megatron_hetero.planner.columns.pool_nodes import PoolNodes
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape, StageTable
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.division.counts import MIN_GAIN
from megatron_hetero.rounding import ROUNDING

STEP_RATIO = 1.25
"""Bundles are generated for step times on a geometric grid, and shared by the times between."""
MAX_ROUNDS = 3
"""Rounds of generating bundles: for a better step time, for one step time, and with dearer scarce
nodes."""
_MAX_KNOWN = 40
_MAX_UNIFORM = 60
"""Equal copies of bundles of any kinds, the soonest to end."""
SLACKS = (1.0, 1.04)
"""Whole bundles do less than fractions of them: times for which they are chosen, over those."""


class PoolBundles(PoolNodes):
    """Bundles of one pool with at most `max_node_layers` layers on a node; remembers what it made.

    Args:
        kinds: the pool's kinds, as positions in the table's.
        replica_counts: equal replicas of a bundle to try.
        known: bundles found for more layers on a node.
        effort: the part of the work of a whole search that this pool is worth.
    """

    def __init__(
        self,
        table: StageTable,
        own_flags: OwnFlags,
        kinds: Sequence[int],
        replica_counts: Sequence[int],
        max_node_layers: int,
        known: Iterable[BundleShape] = (),
        effort: float = 1.0,
    ) -> None:
        super().__init__(table, own_flags, kinds, max_node_layers)
        self.effort = effort
        self.pricers = [
            BundlePricer(table, kinds, count, max_node_layers) for count in replica_counts
        ]
        self.bundles: dict[BundleShape, Bundle | None] = {}
        self.of_fewer_kinds: list[Bundle] = []
        """Bundles for equal copies alone: in a mixture, `generate` finds those that are worth
        their nodes."""
        self._generated: set[int] = set()
        self._made: BundleColumns | None = None
        known = list(known)
        for shape in known:
            self.bundles[shape] = self.bundle(shape)
        if not known:
            for pricer in self.pricers:
                for shape in plain_shapes(table, pricer, self.capacity):
                    if shape not in self.bundles:
                        self.bundles[shape] = self.bundle(shape)
                likely = self._part_of(MAX_LIKELY)
                for shape, bundle in soonest_of_several_kinds(self, pricer, likely):
                    self.bundles.setdefault(shape, bundle)
                self.of_fewer_kinds += soonest_of_fewer_kinds(self, pricer, likely)

    def mixes(self, step_s: float) -> list[Mix]:
        """Return the best division of the pool for a step time: over all bundles, and over those
        of each number of replicas alone."""
        replicas = self.columns().num_replicas
        counts = np.unique(replicas)
        worths = self.columns().micro_batches(step_s)
        mixes = [self.solve(worths)]
        if len(counts) > 1:
            mixes += [self.solve(np.where(replicas == count, worths, 0.0)) for count in counts]
        return mixes

    def uniform_mixes(self, num_micro_batches: int) -> list[Mix]:
        """Return as many equal bundles as there is room for, and one alone; the soonest to end
        first."""
        ranked = []
        for index, bundle in enumerate(self.columns().bundles):
            for count in {1, *numbers_of_copies(self, bundle, num_micro_batches)}:
                share = -(-num_micro_batches // (count * bundle.shape.num_replicas))
                ranked.append((bundle.filled.quick_time_s(share), count, index, bundle))
        ranked.sort()
        return [((bundle, count),) for _, count, _, bundle in ranked[:_MAX_UNIFORM]]

    def mixes_of_fewer_kinds(self, num_micro_batches: int, most_s: float) -> Iterator[Mix]:
        """Yield equal bundles on nodes of one or two kinds that end in less than so many seconds
        before the exchange.  It may be so much shorter than that of more kinds that they win."""
        for bundle in self.of_fewer_kinds:
            for count in numbers_of_copies(self, bundle, num_micro_batches):
                share = -(-num_micro_batches // (count * bundle.shape.num_replicas))
                if bundle.filled.quick_time_s(share) < most_s:
                    yield ((bundle, count),)

    def best_shapes(self, step_s: float) -> list[BundleShape]:
        """Return, for each number of replicas, the bundles with the most work per price of
        nodes."""
        values, columns = self._first_values(step_s), self.columns()
        price = np.array([values[kind] for kind in self.kinds]) @ columns.rows
        worth = columns.micro_batches(step_s) / price
        best = []
        for count in np.unique(columns.num_replicas):
            index = np.flatnonzero(columns.num_replicas == count)
            ranked = index[np.argsort(-worth[index], kind="stable")]
            best += [columns.bundles[i].shape for i in ranked[: self._part_of(_MAX_KNOWN)]]
        return best

    def micro_batches(self, step_s: float) -> float:
        """Return micro-batches of the whole pool in a step, by the bundles known, taken in
        fractions."""
        return self._relaxed(step_s)[0]

    def _part_of(self, whole: int) -> int:
        return max(1, round(self.effort * whole))

    def generate(self, step_s: float) -> bool:
        """Generate columns at the grid's step time next above `step_s`; whether it was
        new."""
        level = int(np.ceil(np.log(step_s) / np.log(STEP_RATIO)))
        if level in self._generated:
            return False
        self._generated.add(level)
        step_s = STEP_RATIO**level
        values = self._first_values(step_s)
        for _ in range(self._part_of(MAX_ROUNDS)):
            total = 0.0
            if self.columns().bundles:
                # The dual values of the present bundles price the next ones.
                total, values = self._relaxed(step_s)
            found = False
            for pricer in self.pricers:
                found |= self._price(pricer, step_s, values, MIN_GAIN * total)
            if not found:
                break
        return True

    def _price(
        self, pricer: BundlePricer, step_s: float, values: Mapping[int, float], least: float
    ) -> bool:
        """Add the bundles worth more than their nodes; whether there were new ones.

        The path does not count nodes: kinds of which it took too many become dearer for it.
        """
        found = False
        values = dict(values)
        for _ in range(self._part_of(MAX_ROUNDS)):
            scarce: set[int] = set()
            for shape in pricer.best(step_s, values, least):
                if shape not in self.bundles:
                    self.bundles[shape] = self.bundle(shape)
                    found |= self.bundles[shape] is not None
                scarce |= {k for k, n in shape.num_nodes().items() if n > self.capacity[k]}
            if not scarce:
                break
            # A kind without any value would stay free at any factor, hence the small addition.
            spread = max(values.values())
            values |= {k: 1.5 * values[k] + 0.05 * spread for k in scarce}
        return found

    def close(self) -> None:
        """Forget the tables from which bundles are generated; the bundles stay."""
        for pricer in self.pricers:
            pricer.close()

    def columns(self) -> BundleColumns:
        """Return the bundles that may be used; bundles only ever come."""
        bundles = tuple(bundle for bundle in self.bundles.values() if bundle is not None)
        # Bundles are never removed, so that a longer list is a new one.
        if self._made is None or len(self._made.bundles) < len(bundles):
            taken = [bundle.shape.num_nodes() for bundle in bundles]
            rows = [[nodes.get(kind, 0) for nodes in taken] for kind in self.kinds]
            self._made = BundleColumns(
                bundles,
                np.array([bundle.shape.num_replicas for bundle in bundles], float),
                np.array([bundle.filled.fill_s for bundle in bundles]),
                np.array([bundle.filled.period_s for bundle in bundles]),
                np.array(rows, float).reshape(len(self.kinds), len(bundles)),
            )
        return self._made

    def _first_values(self, step_s: float) -> dict[int, float]:
        """Guess before any bundle is known: a node's share of layers, were there no fill."""
        values = {}
        for kind in self.kinds:
            per_layer_s = self.table.gpu_layer_s(kind)
            gpus = self.table.kinds[kind].num_gpus
            # Half of it: at too high a value no bundle would be worth its nodes.
            values[kind] = step_s * gpus / per_layer_s / self.table.problem.num_layers / 2
        return values

    def _relaxed(self, step_s: float) -> tuple[float, dict[int, float]]:
        """Return most micro-batches with parts of bundles, and what a node of each kind adds."""
        columns = self.columns()
        found = pack(columns.micro_batches(step_s), columns.rows, self.nodes())
        values = {k: float(v) for k, v in zip(self.kinds, found.row_values, strict=True)}
        return found.worth, values

    def solve(self, worths: Floats) -> Mix:
        """Return whole bundles by diving: the whole part of the relaxed answer, then again for the
        nodes that are left; where there is no whole part, one more of the bundle taken most."""
        columns = self.columns()
        counts = np.zeros(len(worths), np.int64)
        left = self.nodes()
        while True:
            fitting = (worths > 0) & (columns.rows <= left[:, None]).all(axis=0)
            index = np.flatnonzero(fitting)
            if not len(index):
                return tuple((columns.bundles[i], int(counts[i])) for i in np.flatnonzero(counts))
            worth, rows = worths[index], columns.rows[:, index]
            worth = worth - 1e-6 * worth.max() * rows.sum(axis=0)  # of equals, on fewer nodes
            taken = pack(worth, rows, left).taken
            whole = np.floor(taken + ROUNDING)
            if not whole.any():
                whole[np.argmax(taken)] = 1
            counts[index] += whole.astype(np.int64)
            left -= rows @ whole
