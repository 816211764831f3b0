"""The dynamic programme behind `pricing`: the cheapest sequence of blocks for every period.

It goes from the last stage of a pipeline to the first.  A state holds the stages and the layers
that are placed already.  Arrays hold all blocks and periods, so each step treats all of them at
once.

What any block costs for each of its layers at least tells what a state costs once it has all layers
at least.  States and blocks that lead to no better pipeline than is known are left out by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megatron_hetero.kernels import KERNELS, Kernels
from megatron_hetero.planner.shapes.kinds import NodeBlock

Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Shorts = npt.NDArray[np.int16]

_LESS = 1 - 1e-9
"""Makes what is left out surely no better: sums of many numbers are rounded."""


@dataclass(frozen=True)
class HeldLayers:
    """What blocks hold: shape [stages behind the block, block, period]; zero is nothing.

    `base_s` is a micro-batch's seconds beside those of the layers, [stages behind it, block].
    """

    layers: Shorts
    base_s: Floats


@dataclass(frozen=True, eq=False)
class BlockMenu:
    """The blocks that a pipeline is made of; every array's axis "block" is in their order.

    `first` is what a block holds that also has the embedding.  `hops_s` is a round trip to a block
    from the one behind it.
    """

    blocks: tuple[NodeBlock, ...]
    num_layers: int
    periods_s: Floats
    layer_s: Floats
    held: HeldLayers
    first: HeldLayers
    hops_s: Floats
    may_start: Flags
    may_end: Flags

    @cached_property
    def num_widths(self) -> Ints:
        """Stages of each block."""
        return np.array([len(block.widths) for block in self.blocks], np.int64)

    @cached_property
    def of_length(self) -> list[tuple[int, Flags]]:
        """Which blocks have so many stages."""
        return [(int(n), self.num_widths == n) for n in np.unique(self.num_widths)]


class _End(NamedTuple):
    """How the cheapest pipeline of a period begins: stages behind the first block, its index, and
    the layers behind."""

    num_stages: int | Ints
    block: int | Ints
    layer: int | Ints


@dataclass(frozen=True, eq=False)
class _Room:
    """Bounds on the cost of further blocks, at the periods `live` with a possible gain.
    each[period]: least cost of a layer. left[period]: most cost of a block beyond `each`.
    cost[period, layer]: cost of the blocks behind. hops[block, period]: cost of the boundary."""

    live: Ints
    each: Floats
    left: Floats
    cost: Floats
    hops: Floats


class BundlePaths:
    """Of each period up to `step_s`, the blocks of the pipeline that costs least.

    A pipeline costs the prices of its blocks and its seconds for one micro-batch over the period.

    Args:
        menu: the blocks.
        prices: of each block, shape [block]; not negative.
        step_s: of the step; a replica does one micro-batch, and one more in each period after it.
        least_worth: pipelines whose micro-batches are worth no more than this beyond their cost
            are left out.
    """

    def __init__(
        self, menu: BlockMenu, prices: Floats, step_s: float, least_worth: float = -np.inf
    ) -> None:
        self.menu = menu
        self.periods_s = menu.periods_s[menu.periods_s <= step_s]
        self.prices = prices
        num_periods = len(self.periods_s)
        # At this cost a pipeline's micro-batches are worth `least_worth` more than they cost.
        self.end_cost = 1 + step_s / self.periods_s - least_worth
        """[period]; infinite where there is no pipeline."""
        self._end = np.full((num_periods, len(_End._fields)), -1, np.int64)
        """`_End` of each."""
        self._by = np.zeros((len(menu.held.layers) + 1, num_periods, menu.num_layers), np.int16)
        """The block before, [stages, period, layer]."""
        self._cost: dict[int, Floats] = {}
        """By stages, [period, layer, and as many that no state has]."""
        self._shape = (num_periods, 2 * menu.num_layers)
        if num_periods and menu.blocks:
            self._search() if KERNELS is None else self._search_compiled(KERNELS)
        self.end_cost[self._end[:, 0] < 0] = np.inf

    def blocks(self, period: int) -> tuple[NodeBlock, ...]:
        """Return the cheapest pipeline of a period, first block first; empty if there is none."""
        if not np.isfinite(self.end_cost[period]):
            return ()
        menu = self.menu
        num_stages, index, layer = (int(value) for value in self._end[period])
        blocks = [menu.blocks[index]]
        while num_stages:
            index = int(self._by[num_stages, period, layer])
            # Backwards through the table: from the first block to those behind it.
            blocks.append(menu.blocks[index])
            num_stages -= len(menu.blocks[index].widths)
            layer -= int(menu.held.layers[num_stages, index, period])
        return tuple(blocks)

    def _least_per_layer(self) -> Floats:
        """Return the least cost per layer of any block with at least this many stages behind, shape
        [stages, period]; hops are left out."""
        menu, num_periods = self.menu, len(self.periods_s)
        least = np.full((len(menu.held.layers), num_periods), np.inf)
        for of in (menu.held, menu.first):
            layers = of.layers[..., :num_periods]
            # [block, period]: the block's price and fixed seconds, in micro-batches.
            beside = self.prices[:, None] + of.base_s[..., None] / self.periods_s
            each = beside / np.maximum(layers, 1) + menu.layer_s[:, None] / self.periods_s
            least = np.minimum(least, np.where(layers > 0, each, np.inf).min(axis=1))
        # The least over all states with at least as many stages behind.
        return np.minimum.accumulate(least[::-1], axis=0)[::-1] * _LESS

    def _search_compiled(self, kernels: Kernels) -> None:
        """Find what `_search` does: the same operations in the same order for each period."""
        menu = self.menu
        kernels.block_paths(
            menu.held.layers,
            menu.held.base_s,
            menu.first.layers,
            menu.first.base_s,
            menu.num_widths,
            menu.layer_s,
            menu.hops_s,
            menu.may_start,
            menu.may_end,
            self.prices,
            self.periods_s,
            _LESS,
            self.end_cost,
            self._end,
            self._by,
        )

    def _search(self) -> None:
        menu, num_layers = self.menu, self.menu.num_layers
        least_per_layer = self._least_per_layer()
        # [period, layer]: the second half, which stays infinite, is for places without a state.
        start = np.full(self._shape, np.inf)
        start[:, 0] = 0.0
        self._cost[0] = start
        hops = menu.hops_s[:, None] / self.periods_s
        for num_stages in range(len(menu.held.layers)):
            before = self._cost.pop(num_stages, None)
            # No sequence of blocks has so many stages.
            if before is None:
                continue
            each = least_per_layer[num_stages]
            # [layer]: layers that are still missing.
            missing = num_layers - np.arange(num_layers)
            # [period]: a bound of every pipeline that goes on from these states.
            whole = (before[:, :num_layers] + each[:, None] * missing).min(axis=1)
            live = np.flatnonzero(whole < self.end_cost)
            if not len(live):
                continue
            # The last block of a pipeline has no boundary behind it.
            way = hops[:, live] if num_stages else np.zeros((len(menu.blocks), len(live)))
            left = self.end_cost[live] - whole[live]
            room = _Room(live, each[live], left, before[live], way)
            # Only blocks that may end a pipeline can be its last.
            usable = menu.may_end | (num_stages > 0)
            self._finish(num_stages, usable & menu.may_start, room)
            self._extend(num_stages, usable, room)

    def _finish(self, num_stages: int, usable: Flags, room: _Room) -> None:
        """Close with a block that holds the first layers."""
        menu, live = self.menu, room.live
        most, periods_s = menu.first.layers[num_stages][:, live], self.periods_s[live]
        fixed = self.prices[:, None] + menu.first.base_s[num_stages][:, None] / periods_s
        per_layer = menu.layer_s[:, None] / periods_s
        more = per_layer - room.each
        # Layers dearer than the least price count as few as there can be, cheaper ones as many.
        beyond = fixed + np.where(more > 0, menu.num_widths[:, None], most) * more
        may_gain = (most >= menu.num_widths[:, None]) & (beyond < room.left)
        index = np.flatnonzero(usable & may_gain.any(axis=1))
        if not len(index):
            return
        # Only states from `start` layers on can be closed by a first block.
        most = most[index]
        start = menu.num_layers - int(most.max())
        left = menu.num_layers - np.arange(start, menu.num_layers)
        total = room.cost[:, start : menu.num_layers] + per_layer[index][..., None] * left
        total += (fixed[index] + room.hops[index])[..., None]
        fits = (left <= most[..., None]) & (left >= menu.num_widths[index, None, None])
        # [live period, (block, layer)], flattened for one `argmin`.
        total = np.where(fits, total, np.inf).transpose(1, 0, 2).reshape(len(live), -1)
        choice = np.argmin(total, axis=1)
        least = total[np.arange(len(live)), choice]
        better = np.flatnonzero(least < self.end_cost[live])
        if not len(better):
            return
        chosen, layer = np.divmod(choice[better], len(left))
        block, layer, period = index[chosen], layer + start, live[better]
        self.end_cost[period] = least[better]
        end = _End(num_stages, block, layer)
        self._end[period] = np.stack(np.broadcast_arrays(*end), axis=1)

    def _extend(self, num_stages: int, usable: Flags, room: _Room) -> None:
        """Put a block before what is there; the states behind it are found by its layers."""
        menu, live = self.menu, room.live
        held = menu.held.layers[num_stages][:, live]
        # [block, live period]: seconds of a micro-batch on the block, with all layers that it
        # holds.
        seconds = held * menu.layer_s[:, None] + menu.held.base_s[num_stages][:, None]
        added = self.prices[:, None] + seconds / self.periods_s[live] + room.hops
        may_gain = (held > 0) & (added - held * room.each < room.left)
        index = np.flatnonzero(usable & may_gain.any(axis=1))
        if not len(index):
            return
        held, added = held[index], np.where(held > 0, added, np.inf)[index]
        # Before the first state there is none: negative places are among those at the end.
        # [block, live period, layer]: where each new state comes from.
        source = np.arange(menu.num_layers) - held[..., None]
        new = room.cost[np.arange(len(live))[:, None], source]
        new += added[..., None]
        for num_more, of_length in menu.of_length:
            chosen = np.flatnonzero(of_length[index])
            if len(chosen):
                self._keep(num_stages + num_more, new[chosen], index[chosen], live)

    def _keep(self, num_stages: int, cost: Floats, by: Ints, live: Ints) -> None:
        """Keep the cheapest of blocks that lead to as many stages."""
        num_layers = self.menu.num_layers
        if num_stages not in self._cost:
            self._cost[num_stages] = np.full(self._shape, np.inf)
        # [live period, layer], over the blocks of one length.
        best = np.argmin(cost, axis=0)
        least = cost.min(axis=0)
        costs, blocks = self._cost[num_stages][:, :num_layers], self._by[num_stages]
        before = costs[live]
        better = least < before
        costs[live] = np.where(better, least, before)
        blocks[live] = np.where(better, by[best], blocks[live])
