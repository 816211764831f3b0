"""The dynamic programme behind `pricing`: the cheapest sequence of blocks for every period.

It goes from the last stage of a pipeline to the first.  A state holds the stages and the layers
that are placed already, and the site of the block that was placed last.  Arrays hold all blocks and
periods, so each step treats all of them at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from megatron_hetero.planner.columns.kinds import NodeBlock

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class HeldLayers:
    """What blocks hold: shape [stages behind the block, block, period]; zero is nothing.

    `base_s` is a micro-batch's seconds beside those of the layers, [stages behind it, block].
    """

    layers: Ints
    base_s: Floats


@dataclass(frozen=True, eq=False)
class BlockMenu:
    """The blocks that a pipeline is made of; every array's axis "block" is in their order.

    `first` is what a block holds that also has the embedding.  `site` is a number of its site;
    `hops_s[site, block]` a round trip from a block of that site, behind it, to this one.
    """

    blocks: tuple[NodeBlock, ...]
    num_layers: int
    periods_s: Floats
    layer_s: Floats
    held: HeldLayers
    first: HeldLayers
    site: Ints
    hops_s: Floats
    may_start: npt.NDArray[np.bool_]
    may_end: npt.NDArray[np.bool_]

    @cached_property
    def num_widths(self) -> Ints:
        """Stages of each block."""
        return np.array([len(block.widths) for block in self.blocks])

    @cached_property
    def groups(self) -> list[tuple[npt.NDArray[np.bool_], int, int]]:
        """Blocks of as many stages on one site: which, how many stages, and the site."""
        keys = sorted({(int(n), int(s)) for n, s in zip(self.num_widths, self.site, strict=True)})
        return [((self.num_widths == n) & (self.site == s), n, s) for n, s in keys]


class _End(NamedTuple):
    """How the cheapest pipeline of a period begins: stages behind the first block, its index, the
    site behind it, and the layers behind."""

    num_stages: int | Ints
    block: int | Ints
    site: int | Ints
    layer: int | Ints


@dataclass(frozen=True, eq=False)
class _Behind:
    """What is behind a block: the cost by the layers behind, [block (or one for all), period,
    layer]; what its hop adds, [block, period]; and the site that it leads from (None: the only)."""

    cost: Floats
    hops: Floats
    site: Ints | None


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
        num_periods, num_sites = len(self.periods_s), len(menu.hops_s)
        self.end_cost = 1 + step_s / self.periods_s - least_worth
        """[period]; infinite where there is no pipeline."""
        self._end = np.full((num_periods, len(_End._fields)), -1, np.int64)
        """`_End` of each."""
        self._by: dict[int, Ints] = {}
        """The block before and the site behind that, as block * num_sites + site; by stages,
        [site, period, layer]."""
        self._cost: dict[int, Floats] = {}
        self._shape = (num_sites, num_periods, menu.num_layers)
        if num_periods and menu.blocks:
            self._search()
        self.end_cost[self._end[:, 0] < 0] = np.inf

    def blocks(self, period: int) -> tuple[NodeBlock, ...]:
        """Return the cheapest pipeline of a period, first block first; empty if there is none."""
        if not np.isfinite(self.end_cost[period]):
            return ()
        menu, num_sites = self.menu, self._shape[0]
        num_stages, index, site, layer = (int(value) for value in self._end[period])
        blocks = [menu.blocks[index]]
        while num_stages:
            index, before = divmod(int(self._by[num_stages][site, period, layer]), num_sites)
            blocks.append(menu.blocks[index])
            num_stages -= len(menu.blocks[index].widths)
            layer -= int(menu.held.layers[num_stages, index, period])
            site = before
        return tuple(blocks)

    def _search(self) -> None:
        menu = self.menu
        start = np.full(self._shape, np.inf)
        start[0, :, 0] = 0.0
        self._cost[0] = start
        for num_stages in range(len(menu.held.layers)):
            before = self._cost.pop(num_stages, None)
            if before is None:
                continue
            # What costs more than a whole pipeline leads to no better one.
            live = np.flatnonzero((before < self.end_cost[None, :, None]).any(axis=(0, 2)))
            if not len(live):
                continue
            behind = self._behind(num_stages, before[:, live], live)
            usable = menu.may_end | (num_stages > 0)
            first = menu.first.layers[num_stages][:, live]
            index = np.flatnonzero(usable & menu.may_start & (first > 0).any(axis=1))
            if len(index):
                self._finish(num_stages, index, behind, live)
            held = menu.held.layers[num_stages][:, live]
            index = np.flatnonzero(usable & (held > 0).any(axis=1))
            if len(index):
                self._extend(num_stages, index, behind, live)

    def _behind(self, num_stages: int, before: Floats, live: Ints) -> _Behind:
        """Return what is behind a block, for the periods at `live`."""
        menu = self.menu
        if not num_stages:
            return _Behind(before[:1], np.zeros((len(menu.blocks), 1)), None)
        hops = menu.hops_s[:, :, None] / self.periods_s[live]
        if len(before) == 1:
            return _Behind(before, hops[0], None)
        crossed = before[:, None] + hops[..., None]
        site = np.argmin(crossed, axis=0)
        cost = np.take_along_axis(crossed, site[None], axis=0)[0]
        return _Behind(cost, np.zeros((len(menu.blocks), 1)), site)

    def _finish(self, num_stages: int, index: Ints, behind: _Behind, live: Ints) -> None:
        """Close with a block that holds the first layers."""
        menu = self.menu
        most = menu.first.layers[num_stages][np.ix_(index, live)]
        start = menu.num_layers - int(most.max())
        left = menu.num_layers - np.arange(start, menu.num_layers)
        over_period = 1 / self.periods_s[live]
        fixed = self.prices[index, None] + menu.first.base_s[num_stages, index, None] * over_period
        per_layer = menu.layer_s[index, None] * over_period
        total = behind.cost[index % len(behind.cost), :, start:] + per_layer[..., None] * left
        total += (fixed + behind.hops[index])[..., None]
        fits = (left <= most[..., None]) & (left >= menu.num_widths[index, None, None])
        total = np.where(fits, total, np.inf).transpose(1, 0, 2).reshape(len(live), -1)
        choice = np.argmin(total, axis=1)
        least = total[np.arange(len(live)), choice]
        better = np.flatnonzero(least < self.end_cost[live])
        if not len(better):
            return
        chosen, layer = np.divmod(choice[better], len(left))
        block, layer, period = index[chosen], layer + start, live[better]
        self.end_cost[period] = least[better]
        site = 0 if behind.site is None else behind.site[block, better, layer]
        end = _End(num_stages, block, site, layer)
        self._end[period] = np.stack(np.broadcast_arrays(*end), axis=1)

    def _extend(self, num_stages: int, index: Ints, behind: _Behind, live: Ints) -> None:
        """Put a block before what is there; the states behind it are found by its layers."""
        menu, num_layers, num_sites = self.menu, self.menu.num_layers, self._shape[0]
        held = menu.held.layers[num_stages][np.ix_(index, live)]
        seconds = held * menu.layer_s[index, None] + menu.held.base_s[num_stages, index, None]
        added = self.prices[index, None] + seconds / self.periods_s[live] + behind.hops[index]
        # Rows of states shifted by the layers held; before the first state there is none.
        padded = np.full((*behind.cost.shape[:2], 2 * num_layers), np.inf)
        padded[..., num_layers:] = behind.cost
        windows = sliding_window_view(padded, num_layers, axis=2)
        shift = np.where(held > 0, np.minimum(held, num_layers), num_layers)
        rows = (index % len(padded))[:, None], np.arange(len(live)), num_layers - shift
        new = windows[rows] + added[..., None]
        by = index[:, None, None] * num_sites
        if behind.site is not None:
            source = np.maximum(np.arange(num_layers) - shift[..., None], 0)
            by = by + np.take_along_axis(behind.site[index], source, axis=2)
        for group, num_more, site in menu.groups:
            chosen = group[index]
            if chosen.any():
                self._keep((num_stages + num_more, site), new[chosen], by[chosen], live)

    def _keep(self, place: tuple[int, int], cost: Floats, by: Ints, live: Ints) -> None:
        """Keep the cheapest of blocks that lead to as many stages and one site (`place`)."""
        num_stages, site = place
        best = np.argmin(cost, axis=0)
        least = cost.min(axis=0)
        if num_stages not in self._cost:
            self._cost[num_stages] = np.full(self._shape, np.inf)
            self._by[num_stages] = np.zeros(self._shape, np.int64)
        if by.shape[1:] == (1, 1):
            chosen = by[:, 0, 0][best]
        else:
            chosen = np.take_along_axis(by, best[None], axis=0)[0]
        costs, blocks = self._cost[num_stages][site], self._by[num_stages][site]
        better = least < costs[live]
        costs[live] = np.where(better, least, costs[live])
        blocks[live] = np.where(better, chosen, blocks[live])
