"""Bundles whose equal copies take up a pool: blocks of several kinds in the order that holds most.

The prices of `pricing` lead to bundles that are worth most in a mixture.  Equal copies are another
question: each has so many nodes of every kind and no more, and no price says which numbers are
best.  So all numbers of blocks of each kind are looked at, with one cut of its nodes for each kind,
and for each pair of kinds at the ends (which have the embedding and the head) the order of the
blocks that holds most layers within a period, whatever kinds stand between blocks of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from math import comb
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_hetero.planner.columns.bundle_paths import Flags, Floats, HeldLayers, Ints
from megatron_hetero.planner.columns.bundle_shapes import is_plain
from megatron_hetero.planner.columns.pricing import BundlePricer, BundleShape, StageTable

MAX_KINDS = 3
"""Kinds in one bundle, of the fastest ones and one more."""
_MAX_NUMBERS = 60_000
"""Numbers of blocks of each kind, times ways: more kinds or cuts have fewer blocks."""
MAX_LIKELY = 192
"""Numbers and ways whose orders are made, the soonest by an estimate."""
_MAX_ORDERS = 3
"""Orders of each: those that hold most within so many periods, from the shortest possible on."""
_PER_LAYER = 256
"""A layer counts as much as so many boundaries between unlike kinds, of which fewer are better."""
_NOTHING = np.int32(-(1 << 30))

_Worths = npt.NDArray[np.int32]


def equal_shapes(
    table: StageTable,
    pricer: BundlePricer,
    capacity: Mapping[int, int],
    num_likely: int = MAX_LIKELY,
    num_kinds: int = MAX_KINDS,
) -> list[BundleShape]:
    """Return bundles of two kinds or more of which as many copies as there is room for end soon,
    the soonest first by an estimate.

    Args:
        capacity: nodes of each kind.
        num_likely: numbers and ways whose orders are made, the soonest by an estimate.
        num_kinds: looked at together.
    """
    speed = {
        kind: capacity[kind] * table.kinds[kind].num_gpus / table.gpu_layer_s(kind)
        for kind in {block.kind for block in pricer.blocks}
    }
    kinds = sorted(speed, key=lambda kind: (-speed[kind], kind))[: MAX_KINDS + 1]
    found: list[tuple[float, BundleShape]] = []
    for of in combinations(sorted(kinds), min(len(kinds), num_kinds)):
        if len(of) > 1:
            found += _Orders(table, pricer, of, capacity, num_likely).shapes()

    def soonest(entry: tuple[float, BundleShape]) -> tuple[float, list[str]]:
        # Of equally soon ones those with the first blocks, by their words.
        seconds, shape = entry
        return seconds, [pricer.words[block] for block in shape.blocks]

    return list(dict.fromkeys(shape for _, shape in sorted(found, key=soonest)))


@dataclass(frozen=True)
class _Level:
    """Sequences of equally many blocks, built from the last stage on.

    numbers[set, kind]: blocks of each kind.  before[set, kind]: the set without one of them on the
    level below, -1 if there is none.  worth[set, way, period]: layers of the best order, times
    `_PER_LAYER`, less its boundaries between unlike kinds.  by[set, way, period]: the kind of the
    best order's first block.
    """

    numbers: Ints
    before: Ints
    worth: _Worths
    by: npt.NDArray[np.int8]


class _Likely(NamedTuple):
    """A set of blocks with kinds at both ends, about its seconds, and the shortest period in which
    it holds all layers."""

    seconds: float
    size: int
    row: int
    way: int
    first: int
    period: int


class _Orders:
    """The best orders of all numbers of blocks of a few kinds.

    A way is one cut of the nodes of each kind, and the kind at the end of the pipeline.
    """

    def __init__(
        self,
        table: StageTable,
        pricer: BundlePricer,
        kinds: Sequence[int],
        capacity: Mapping[int, int],
        num_likely: int,
    ) -> None:
        self.table, self.pricer, self.num_likely = table, pricer, num_likely
        self.menu = pricer.menu
        # Of each kind the blocks of one width (and a rest), in all combinations: [way, kind].
        plain = [
            [
                index
                for index, block in enumerate(pricer.blocks)
                if block.kind == kind and is_plain(table, block)
            ]
            for kind in kinds
        ]
        cuts = np.array(list(product(*plain)), np.int64)
        self.chosen: Ints = np.repeat(cuts, len(kinds), axis=0)
        self.last: Ints = np.tile(np.arange(len(kinds)), len(cuts))
        self.num_stages: Ints = self.menu.num_widths[self.chosen]
        # [kind]: nodes of a block, which do not depend on how they are cut, and of all blocks.
        self.taken: Ints = np.array([pricer.blocks[of[0]].num_nodes for of in plain], np.int64)
        self.nodes: Ints = np.array([capacity[kind] for kind in kinds], np.int64)
        self.most = 0
        while (
            self.most < pricer.max_stages
            and comb(self.most + 1 + len(kinds), len(kinds)) * len(self.chosen) <= _MAX_NUMBERS
        ):
            self.most += 1

    def shapes(self) -> Iterator[tuple[float, BundleShape]]:
        """Yield bundles with about the seconds that equal copies of each take."""
        levels = [self._first_level()]
        ranked: list[_Likely] = []
        for size in range(1, self.most + 1):
            level = self._numbers(levels[-1])
            if not len(level.numbers):
                break
            # Closed by a block that also holds the embedding, or open for blocks before it.
            closed, open_ = self._extended(levels[-1], level)
            most_s = ranked[-1].seconds if len(ranked) == self.num_likely else np.inf
            ranked += self._likely(level.numbers, closed, size, most_s)
            ranked = sorted(ranked)[:self.num_likely]
            worth = open_.max(axis=1)
            by = np.where(worth > _NOTHING, open_.argmax(axis=1), -1).astype(np.int8)
            levels.append(_Level(level.numbers, level.before, worth, by))
        for one in ranked:
            last = min(one.period + _MAX_ORDERS, len(self.menu.periods_s))
            for period in range(one.period, last):
                yield one.seconds, self._shape(levels, one, period)

    def _shape(self, levels: Sequence[_Level], likely: _Likely, period: int) -> BundleShape:
        """Return the bundle that holds most within a period."""
        blocks, row, kind = [], likely.row, likely.first
        # [kind]: its block on this way.
        chosen = [self.menu.blocks[index] for index in self.chosen[likely.way].tolist()]
        for size in range(likely.size, 0, -1):
            blocks.append(chosen[kind])
            row = levels[size].before.item(row, kind)
            kind = levels[size - 1].by.item(row, likely.way, period)
        return BundleShape(self.pricer.num_replicas, tuple(blocks))

    def _first_level(self) -> _Level:
        """Return the level of no block at all."""
        num_kinds, num_periods = self.chosen.shape[1], len(self.menu.periods_s)
        shape = (1, len(self.chosen), num_periods)
        none: Ints = np.zeros((1, num_kinds), np.int64)
        return _Level(none, none - 1, np.zeros(shape, np.int32), np.full(shape, -1, np.int8))

    def _numbers(self, below: _Level) -> _Level:
        """Return all sets of one block more for which there are nodes, as yet without worths."""
        num_kinds = self.chosen.shape[1]
        known = {tuple(row): index for index, row in enumerate(below.numbers.tolist())}
        rows: dict[tuple[int, ...], list[int]] = {}
        for row, index in known.items():
            for kind in range(num_kinds):
                more = (*row[:kind], row[kind] + 1, *row[kind + 1 :])
                if more[kind] * self.taken[kind] <= self.nodes[kind]:
                    rows.setdefault(more, [-1] * num_kinds)[kind] = index
        numbers = np.array(list(rows), np.int64).reshape(-1, num_kinds)
        before = np.array(list(rows.values()), np.int64).reshape(-1, num_kinds)
        shape = (len(numbers), *below.worth.shape[1:])
        return _Level(numbers, before, np.zeros(shape, np.int32), np.zeros(shape, np.int8))

    def _extended(self, below: _Level, level: _Level) -> tuple[_Worths, _Worths]:
        """Return the worth of each set with a block of each kind at its beginning, [set, kind, way,
        period]: with this block as the pipeline's first, and with others to come before it."""
        menu = self.menu
        # [set, kind, way]: stages behind the block; [kind, way]: the block.
        behind = below.numbers[level.before] @ self.num_stages.T
        block, kinds = self.chosen.T, np.arange(self.chosen.shape[1])[:, None]
        at_end = menu.may_end[block] & (self.last == kinds)
        depth = len(menu.held.layers)
        fits = np.where(behind > 0, behind < depth, at_end) & (level.before >= 0)[..., None]
        before = below.by[level.before]
        unlike = (before != kinds[..., None]) & (before >= 0)
        worth: _Worths = below.worth[level.before] - unlike

        def with_first(held: HeldLayers, usable: Flags) -> _Worths:
            layers = held.layers[np.minimum(behind, depth - 1), block].astype(np.int32)
            may_be = (fits & usable)[..., None] & (layers > 0)
            return np.where(may_be, worth + _PER_LAYER * layers, _NOTHING)

        return with_first(menu.first, menu.may_start[block]), with_first(menu.held, block >= 0)

    def _likely(
        self, numbers: Ints, worth: _Worths, size: int, most_s: float
    ) -> Iterator[_Likely]:
        """Yield the sets that do the batch soonest, and in less than so many seconds.

        Args:
            numbers: of each set.
            worth: of each with its first block, [set, kind, way, period].
            size: number of blocks.
            most_s: seconds.
        """
        problem, periods_s = self.table.problem, self.menu.periods_s
        counts = problem.replica_counts() or (0,)
        used = numbers * self.taken
        # [set]: equal copies, of the kind that runs out first.
        copies = np.where(used > 0, self.nodes // np.maximum(used, 1), counts[-1]).min(axis=1)
        replicas = np.minimum(copies * self.pricer.num_replicas, counts[-1])
        holds = worth > _PER_LAYER * (problem.num_layers - 1)
        period = np.argmax(holds, axis=3)
        # Between two periods of the grid, by the layers that there is room for.
        held = -(-np.take_along_axis(worth, period[..., None], axis=3)[..., 0] // _PER_LAYER)
        shorter_s = np.where(period > 0, periods_s[np.maximum(period - 1, 0)], 0.0)
        at_once_s = periods_s[period] * problem.num_layers / np.maximum(held, problem.num_layers)
        share = -(-problem.num_micro_batches // np.maximum(replicas, 1))
        # [set, way]: passes of a micro-batch, one after the other.
        passes = share[:, None] - 1 + numbers @ self.num_stages.T
        seconds: Floats = passes[:, None] * np.maximum(shorter_s, at_once_s)
        # One kind alone needs no order (`bundle_shapes.shapes_of_one_kind`).
        may_be = (replicas > 0) & (np.count_nonzero(numbers, axis=1) > 1)
        seconds[~(holds.any(axis=3) & may_be[:, None, None])] = np.inf
        # The soonest, of equals the first of `_Likely`.
        seconds, period = np.swapaxes(seconds, 1, 2), np.swapaxes(period, 1, 2)
        sooner = np.flatnonzero(seconds < most_s)
        order = sooner[np.argsort(seconds.flat[sooner], kind="stable")][:self.num_likely]
        for row, way, first in np.array(np.unravel_index(order, seconds.shape)).T.tolist():
            at = row, way, first
            yield _Likely(float(seconds[at]), size, *at, int(period[at]))
