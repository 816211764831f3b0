"""The cheapest chain of stages that does so many micro-batches in a step: half of the bound.

A stage with n layers of t seconds a micro-batch, behind stages of together S seconds, ends a step
of m micro-batches at S + m t at the earliest, whatever the launch counts: its first forward waits
for the first micro-batch, and its last backward for all its own work.  The exchange of its
gradients follows, but may hide behind the backward passes of stages before it.  Hops between
stages are left out.  The dynamic programme runs over the layers held so far and over S, rounded
down to a grid, so that it never finds less than there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron_hetero.cost.sync import LeastSync

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_GRID = 64
"""Steps of the seconds that lie before a stage."""


@dataclass(frozen=True)
class StageOption:
    """A group of `width` GPUs of a class as one stage; seconds are of one micro-batch, `sync`'s of
    a step."""

    gpu_class: int
    width: int
    embedding_s: float
    layer_s: float
    head_s: float
    max_layers: tuple[tuple[int, int, int, int], ...]
    """Layers that fit, [micro-batches in flight - 1][2 * is_first + is_last]."""
    sync: LeastSync
    base_s: float = 0.0
    """What it takes beside its layers and the model's ends."""

    def sync_s(self, num_layers: int, first: bool, last: bool) -> float:
        """The least exchange of the stage's gradients."""
        ends_s = self.sync.embedding_s * first + self.sync.head_s * last
        return num_layers * self.sync.layer_s + ends_s

    def fits(self, num_layers: int, first: bool, last: bool, in_flight: int) -> bool:
        """Whether memory allows so many layers."""
        row = self.max_layers[min(in_flight, len(self.max_layers)) - 1]
        return num_layers <= row[2 * first + last]


@dataclass(frozen=True)
class CheapestChain:
    """What the GPUs of the cheapest chain cost at least, and which they are in such a chain."""

    price: float
    gpus: Mapping[int, int]


class ChainPricer:
    """Cheapest chains of `num_layers` layers."""

    def __init__(self, options: Sequence[StageOption], num_layers: int) -> None:
        self.options = options
        self.num_layers = num_layers
        self.work = 0
        """States times moves looked at so far."""
        most = max(1, *(max(option.max_layers[0]) for option in options))
        self._num_later = [-(-(num_layers - end) // most) for end in range(num_layers + 1)]

    def cheapest(
        self, step_s: float, num_micro_batches: int, prices: Sequence[float]
    ) -> CheapestChain | None:
        """The chain of least price that can do `num_micro_batches` in `step_s`; None if none can.

        Args:
            prices: of one GPU of each class.
        """
        job = _Job(self, step_s, num_micro_batches, prices)
        firsts, inners = job.moves(first=True), job.moves(first=False)
        least = np.full((self.num_layers, _GRID), np.inf)
        least[0, 0] = 0.0
        end: tuple[float, int, int, int] | None = None
        for held in range(self.num_layers):
            if held:
                least[held] = self._least(least, firsts, inners, held, num_micro_batches)
            for index, option in enumerate(self.options):
                last_tick = job.closing_tick(option, held)
                if last_tick is None:
                    continue
                tick = int(np.argmin(least[held, : last_tick + 1]))
                price = float(least[held, tick]) + option.width * prices[option.gpu_class]
                if end is None or price < end[0]:
                    end = price, held, tick, index
        if end is None or not np.isfinite(end[0]):
            return None
        return CheapestChain(end[0], self._gpus(least, (firsts, inners), end, num_micro_batches))

    def _least(
        self, least: Floats, firsts: _Moves, inners: _Moves, held: int, num_micro_batches: int
    ) -> Floats:
        """Prices of the states with so many layers, [tick]."""
        self.work += (len(firsts.option) + len(inners.option)) * _GRID
        in_flight = min(num_micro_batches, 1 + self._num_later[held])
        prices = np.full((2, _GRID), np.inf)
        for row, moves in enumerate((firsts, inners)):
            chosen = moves.chosen(held, in_flight, row == 0)
            if len(chosen):
                prices[row] = moves.prices(least, held, chosen).min(axis=0)
        return prices.min(axis=0)

    def _gpus(
        self,
        least: Floats,
        tables: tuple[_Moves, _Moves],
        end: tuple[float, int, int, int],
        num_micro_batches: int,
    ) -> dict[int, int]:
        """GPUs of the path that ends with `end`, walked back."""
        _, held, tick, index = end
        gpus: dict[int, int] = {}
        while True:
            option = self.options[index]
            gpus[option.gpu_class] = gpus.get(option.gpu_class, 0) + option.width
            if not held:
                return gpus
            in_flight = min(num_micro_batches, 1 + self._num_later[held])
            ways: list[tuple[float, int, int, int]] = []
            for is_first, moves in zip((True, False), tables, strict=True):
                chosen = moves.chosen(held, in_flight, is_first)
                if len(chosen):
                    prices = moves.prices(least, held, chosen)[:, tick]
                    way = chosen[int(np.argmin(prices))]
                    ways.append(
                        (
                            float(prices.min()),
                            held - int(moves.layers[way]),
                            tick - int(moves.ticks[way]),
                            int(moves.option[way]),
                        )
                    )
            _, held, tick, index = min(ways)


@dataclass(frozen=True)
class _Moves:
    """All stages that are not last; arrays have shape [move], `source` and `price` [move, tick]."""

    option: Ints
    layers: Ints
    ticks: Ints
    max_layers: Ints
    """Layers that fit, [micro-batches in flight - 1, move]."""
    source: Ints
    price: Floats
    """Infinite where the stage cannot begin."""

    def chosen(self, held: int, in_flight: int, is_first: bool) -> Ints:
        """Moves that lead to so many layers and fit."""
        most = self.max_layers[min(in_flight, len(self.max_layers)) - 1]
        before = self.layers == held if is_first else self.layers < held
        return np.flatnonzero(before & (self.layers <= most))

    def prices(self, least: Floats, held: int, chosen: Ints) -> Floats:
        """Price of each chosen move's end, [move, tick]."""
        before = (held - self.layers[chosen])[:, None]
        return least[before, self.source[chosen]] + self.price[chosen]


@dataclass(frozen=True)
class _Job:
    """One question to a `ChainPricer`."""

    pricer: ChainPricer
    step_s: float
    num_micro_batches: int
    prices: Sequence[float]

    def moves(self, *, first: bool) -> _Moves:
        """All first, or all inner stages."""
        tick_s, allowed_s = self.step_s / _GRID, self.step_s * (1 + 1e-9)
        rows: list[tuple[int, int, int, int, float]] = []
        for index, option in enumerate(self.pricer.options):
            price = option.width * self.prices[option.gpu_class]
            for layers in range(1, self.pricer.num_layers):
                time_s = option.base_s + option.embedding_s * first + layers * option.layer_s
                spare_s = allowed_s - self.num_micro_batches * time_s
                late = spare_s < option.sync_s(layers, first, False)
                if (
                    spare_s < 0
                    or late
                    or not option.fits(layers, first, False, min(2, self.num_micro_batches))
                ):
                    break
                last_tick = min(int(spare_s / tick_s), _GRID - 1)
                rows.append((index, layers, int(time_s / tick_s), last_tick, price))
        options = np.array([row[0] for row in rows], np.int64)
        layers_of = np.array([row[1] for row in rows], np.int64)
        ticks = np.array([row[2] for row in rows], np.int64)
        last = np.array([row[3] for row in rows], np.int64)
        price_of = np.array([row[4] for row in rows])
        source = np.arange(_GRID)[None, :] - ticks[:, None]
        can_begin = (source >= 0) & (source <= last[:, None])
        table = np.array([option.max_layers for option in self.pricer.options], np.int64)
        return _Moves(
            options,
            layers_of,
            ticks,
            table[options, :, 2 * first].T,
            np.where(can_begin, source, 0),
            np.where(can_begin, price_of[:, None], np.inf),
        )

    def closing_tick(self, option: StageOption, held: int) -> int | None:
        """The last tick at which a stage with all layers from `held` on may begin."""
        layers = self.pricer.num_layers - held
        if not option.fits(layers, held == 0, True, 1):
            return None
        time_s = option.base_s + layers * option.layer_s + option.head_s
        time_s += 0.0 if held else option.embedding_s
        spare_s = self.step_s * (1 + 1e-9) - self.num_micro_batches * time_s
        if spare_s < option.sync_s(layers, not held, True):
            return None
        return min(int(spare_s / self.step_s * _GRID), _GRID - 1) if spare_s >= 0 else None
