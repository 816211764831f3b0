"""The cheapest chain of stages that does so many micro-batches in a step: the bound's inner problem.

A stage with n layers of t seconds a micro-batch, behind stages of together S seconds, ends a step
of m micro-batches at S + m t at the earliest, whatever the launch counts: its first forward waits
for the first micro-batch, and its last backward for all its own work.  Hops between stages are left
out.  The dynamic programme runs over the layers held so far and over S, rounded down to a grid, so
that it never finds less than there is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_GRID = 96
"""Steps of the seconds that lie before a stage."""


@dataclass(frozen=True)
class StageOption:
    """A group of `width` GPUs of a class as one stage; seconds are of one micro-batch."""

    gpu_class: int
    width: int
    embedding_s: float
    layer_s: float
    head_s: float
    max_layers: tuple[tuple[int, int, int, int], ...]
    """Layers that fit, [micro-batches in flight - 1][2 * is_first + is_last]."""

    def fits(self, num_layers: int, first: bool, last: bool, in_flight: int) -> bool:
        """Whether memory allows so many layers."""
        row = self.max_layers[min(in_flight, len(self.max_layers)) - 1]
        return num_layers <= row[2 * first + last]


@dataclass(frozen=True)
class CheapestChain:
    """What the GPUs of the cheapest chain cost at least, and which they are in such a chain."""

    price: float
    gpus: Mapping[int, int]


@dataclass(frozen=True)
class _Move:
    """A stage by its option, with what it takes of the grid."""

    option: int
    num_layers: int
    ticks: int
    last_tick: int
    """The last at which the stage may begin."""
    price: float


class ChainPricer:
    """Cheapest chains of `num_layers` layers."""

    def __init__(self, options: Sequence[StageOption], num_layers: int) -> None:
        self.options = options
        self.num_layers = num_layers
        self._most = max(1, *(max(option.max_layers[0]) for option in options))

    def cheapest(
        self, step_s: float, num_micro_batches: int, prices: Sequence[float]
    ) -> CheapestChain | None:
        """The chain of least price that can do `num_micro_batches` in `step_s`; None if none can.

        Args:
            prices: of one GPU of each class.
        """
        firsts = self._moves(step_s, num_micro_batches, prices, first=True)
        inners = self._moves(step_s, num_micro_batches, prices, first=False)
        least = np.full((self.num_layers + 1, _GRID), np.inf)
        least[0, 0] = 0.0
        end: tuple[float, int, int, int] | None = None
        for start in range(self.num_layers):
            row = least[start]
            if not np.isfinite(row).any():
                continue
            for index, option in enumerate(self.options):
                last_tick = self._closing_tick(option, start, step_s, num_micro_batches)
                if last_tick is None:
                    continue
                tick = int(np.argmin(row[: last_tick + 1]))
                price = float(row[tick]) + option.width * prices[option.gpu_class]
                if end is None or price < end[0]:
                    end = price, start, tick, index
            for move in inners if start else firsts:
                self._take(move, start, row, least, num_micro_batches)
        if end is None or not np.isfinite(end[0]):
            return None
        return CheapestChain(end[0], self._gpus(least, firsts, inners, end))

    def _moves(
        self, step_s: float, num_micro_batches: int, prices: Sequence[float], *, first: bool
    ) -> list[_Move]:
        """All stages but a last one."""
        tick_s, allowed_s = step_s / _GRID, step_s * (1 + 1e-9)
        moves = []
        for index, option in enumerate(self.options):
            price = option.width * prices[option.gpu_class]
            for layers in range(1, self.num_layers):
                time_s = option.embedding_s * first + layers * option.layer_s
                spare_s = allowed_s - num_micro_batches * time_s
                if spare_s < 0 or not option.fits(layers, first, False, min(2, num_micro_batches)):
                    break
                last_tick = min(int(spare_s / tick_s), _GRID - 1)
                moves.append(_Move(index, layers, int(time_s / tick_s), last_tick, price))
        return moves

    def _take(
        self,
        move: _Move,
        start: int,
        row: Floats,
        least: Floats,
        num_micro_batches: int,
    ) -> None:
        """Go from all states with `start` layers to those that a further stage leads to."""
        end = start + move.num_layers
        if end >= self.num_layers:
            return
        num_later = -(-(self.num_layers - end) // self._most)
        in_flight = min(num_micro_batches, 1 + num_later)
        if not self.options[move.option].fits(move.num_layers, start == 0, False, in_flight):
            return
        num_ticks = min(move.last_tick + 1, _GRID - move.ticks)
        if num_ticks > 0:
            target = least[end, move.ticks : move.ticks + num_ticks]
            np.minimum(target, row[:num_ticks] + move.price, out=target)

    def _closing_tick(
        self, option: StageOption, start: int, step_s: float, num_micro_batches: int
    ) -> int | None:
        """The last tick at which a stage with all layers from `start` on may begin."""
        layers = self.num_layers - start
        if not option.fits(layers, start == 0, True, 1):
            return None
        time_s = layers * option.layer_s + option.head_s + (0.0 if start else option.embedding_s)
        spare_s = step_s * (1 + 1e-9) - num_micro_batches * time_s
        return min(int(spare_s / step_s * _GRID), _GRID - 1) if spare_s >= 0 else None

    def _gpus(
        self,
        least: Floats,
        firsts: Sequence[_Move],
        inners: Sequence[_Move],
        end: tuple[float, int, int, int],
    ) -> dict[int, int]:
        """GPUs of the path that ends with `end`, walked back: its sums are met exactly."""
        _, layer, tick, index = end
        gpus: dict[int, int] = {}
        while True:
            option = self.options[index]
            gpus[option.gpu_class] = gpus.get(option.gpu_class, 0) + option.width
            if not layer:
                return gpus
            for move in (*firsts, *inners):
                before, start = layer - move.num_layers, tick - move.ticks
                if before < 0 or not 0 <= start <= move.last_tick:
                    continue
                if least[before, start] + move.price == least[layer, tick]:
                    layer, tick, index = before, start, move.option
                    break
            else:
                raise AssertionError("the cheapest chain has no way back")
