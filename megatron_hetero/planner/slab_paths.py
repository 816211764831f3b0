"""The dynamic programme behind `pricing`: the cheapest sequence of blocks for every period.

It goes from the last stage of a pipeline to the first.  A state is the stages and the layers behind
the next block, and the site of the block before it; all blocks and periods are looked at together,
as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hetero.planner.kinds import Block

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

    blocks: tuple[Block, ...]
    num_layers: int
    periods_s: Floats
    layer_s: Floats
    held: HeldLayers
    first: HeldLayers
    site: Ints
    hops_s: Floats
    may_start: npt.NDArray[np.bool_]
    may_end: npt.NDArray[np.bool_]

    @property
    def num_widths(self) -> Ints:
        """Stages of each block."""
        return np.array([len(block.widths) for block in self.blocks])


class SlabPaths:
    """Of each period up to `step_s`, the blocks of the pipeline that costs least.

    A pipeline costs the prices of its blocks and its seconds for one micro-batch over the period.

    Args:
        prices: of each block, shape [block]; not negative.
    """

    def __init__(self, menu: BlockMenu, prices: Floats, step_s: float) -> None:
        self.menu = menu
        self.periods_s = menu.periods_s[menu.periods_s <= step_s]
        self.prices = prices
        num_periods, num_sites = len(self.periods_s), len(menu.hops_s)
        self.end_cost = np.full(num_periods, np.inf)
        """[period]"""
        self._end = np.zeros((num_periods, 4), np.int64)
        """Stages behind the first block, its index, the site behind it, and the layers behind."""
        self._by: dict[int, Ints] = {}
        """The block before and the site behind that, as block * num_sites + site; by stages,
        [site, period, layer]."""
        self._cost: dict[int, Floats] = {}
        self._shape = (num_sites, num_periods, menu.num_layers)
        if num_periods and menu.blocks:
            self._search()

    def blocks(self, period: int) -> tuple[Block, ...]:
        """The cheapest pipeline of a period, first block first; empty if there is none."""
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
        start = np.full(self._shape, np.inf)
        start[0, :, 0] = 0.0
        self._cost[0] = start
        for num_stages in range(len(self.menu.held.layers)):
            before = self._cost.pop(num_stages, None)
            # What costs more than a whole pipeline leads to no better one.
            if before is None or not (before < self.end_cost[None, :, None]).any():
                continue
            cost, site = self._crossed(num_stages, before)
            self._finish(num_stages, cost, site)
            self._extend(num_stages, cost, site)

    def _crossed(self, num_stages: int, before: Floats) -> tuple[Floats, Ints]:
        """Cost of what is behind each block, its hop included, [block, period, layer], and the site
        that this leads from."""
        menu = self.menu
        if not num_stages:
            shape = (len(menu.blocks), *before.shape[1:])
            return np.broadcast_to(before[0], shape), np.zeros(shape, np.int64)
        hops = menu.hops_s[:, :, None] / self.periods_s
        crossed = before[:, None] + hops[..., None]
        if len(before) == 1:
            return crossed[0], np.zeros(crossed.shape[1:], np.int64)
        site = np.argmin(crossed, axis=0)
        return np.take_along_axis(crossed, site[None], axis=0)[0], site

    def _finish(self, num_stages: int, cost: Floats, site: Ints) -> None:
        """Close with a block that holds the first layers."""
        menu, num_periods = self.menu, len(self.periods_s)
        usable = menu.may_start & (menu.may_end | (num_stages > 0))
        most = menu.first.layers[num_stages, :, :num_periods]
        index = np.flatnonzero(usable & (most > 0).any(axis=1))
        if not len(index):
            return
        left = menu.num_layers - np.arange(menu.num_layers)
        start = menu.num_layers - int(most[index].max())
        left = left[start:]
        over_period = 1 / self.periods_s
        fixed = self.prices[index, None] + menu.first.base_s[num_stages, index, None] * over_period
        per_layer = menu.layer_s[index, None] * over_period
        total = cost[index, :, start:] + fixed[..., None] + per_layer[..., None] * left
        fits = (left <= most[index, :, None]) & (left >= menu.num_widths[index, None, None])
        total = np.where(fits, total, np.inf).transpose(1, 0, 2).reshape(num_periods, -1)
        choice = np.argmin(total, axis=1)
        least = total[np.arange(num_periods), choice]
        better = np.flatnonzero(least < self.end_cost)
        chosen, layer = np.divmod(choice[better], len(left))
        block, layer = index[chosen], layer + start
        self.end_cost[better] = least[better]
        self._end[better, 0] = num_stages
        self._end[better, 1] = block
        self._end[better, 2] = site[block, better, layer]
        self._end[better, 3] = layer

    def _extend(self, num_stages: int, cost: Floats, site: Ints) -> None:
        """Put a block before what is there; the states behind it are found by its layers."""
        menu, num_periods = self.menu, len(self.periods_s)
        usable = menu.may_end | (num_stages > 0)
        held = menu.held.layers[num_stages, :, :num_periods]
        index = np.flatnonzero(usable & (held > 0).any(axis=1))
        if not len(index):
            return
        num_layers = menu.num_layers
        layers = np.where(held[index] > 0, np.minimum(held[index], num_layers), num_layers)
        source = np.arange(num_layers) - layers[..., None]
        reached = source >= 0
        source = np.where(reached, source, 0)
        seconds = layers * menu.layer_s[index, None] + menu.held.base_s[num_stages, index, None]
        added = self.prices[index, None] + seconds / self.periods_s
        new = np.take_along_axis(cost[index], source, axis=2) + added[..., None]
        new = np.where(reached, new, np.inf)
        by = np.take_along_axis(site[index], source, axis=2) + index[:, None, None] * self._shape[0]
        num_behind = num_stages + menu.num_widths[index]
        for place, stages in sorted(set(zip(menu.site[index], num_behind, strict=True))):
            group = np.flatnonzero((menu.site[index] == place) & (num_behind == stages))
            self._keep(int(stages), int(place), new[group], by[group])

    def _keep(self, num_stages: int, site: int, cost: Floats, by: Ints) -> None:
        best = np.argmin(cost, axis=0)[None]
        least = np.take_along_axis(cost, best, axis=0)[0]
        if not np.isfinite(least).any():
            return
        if num_stages not in self._cost:
            self._cost[num_stages] = np.full(self._shape, np.inf)
            self._by[num_stages] = np.zeros(self._shape, np.int64)
        better = least < self._cost[num_stages][site]
        np.copyto(self._cost[num_stages][site], least, where=better)
        chosen = np.take_along_axis(by, best, axis=0)[0]
        np.copyto(self._by[num_stages][site], chosen, where=better)
