"""The axes of the table of chains: the GPUs of each class, or one price of all GPUs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_hetero.bounds.chains.kinds import GpuClass
from megatron_hetero.bounds.chains.stages import ChainStageOptions, Floats
from megatron_hetero.cost.model import CostModel

LEAST_PRICE, MOST_PRICE = 60, 240
"""Lowest price of all GPUs together, and the price that is never reached."""
_MOST_EACH = 2.5
"""In large clusters below this for each GPU: slow ones are priced lower than fast ones."""
_NEAR = 1.02
"""Prices this near to the wanted proportion are not told apart; the lowest count least."""


@dataclass(frozen=True)
class Axes:
    """What a GPU of each class takes along each axis, [class, axis], and all there is."""

    steps: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]

    def changed(self, classes: Sequence[GpuClass], index: int, factor: float) -> Axes:
        """Return whole prices, with the price of a class changed."""
        worths = np.array([step[0] for step in self.steps], float)
        worths[index] *= factor
        return _priced(worths, classes)


def by_number(classes: Sequence[GpuClass]) -> Axes:
    """Return one axis for each class: its GPUs."""
    num = len(classes)
    steps = tuple(tuple(int(i == j) for j in range(num)) for i in range(num))
    return Axes(steps, tuple(c.num_gpus + 1 for c in classes))


def by_speed(sizes: Sequence[CostModel], classes: Sequence[GpuClass]) -> Axes:
    """Return one axis: a whole price for each GPU, by its speed."""
    rows = sizes[0].workload.model.vocab_size
    speeds = [
        max(
            costs.workload.training.micro_batch_size
            / (width * costs.pieces(c.node, width, rows).layer.total_s)
            for costs in sizes
            for width in c.widths
        )
        for c in classes
    ]
    return _priced(np.array(speeds), classes)


def by_pace(
    options: ChainStageOptions,
    classes: Sequence[GpuClass],
    num_sequences: float,
    step_s: float,
    deep: bool,
) -> Axes | None:
    """Return one axis: a whole price for each GPU, by the whole layers of which it does so many
    sequences in a step; none where no GPU does any.

    These are the best prices for replicas that do as many sequences each, wherever a layer fits.

    Args:
        deep: with as much memory as many micro-batches in flight leave; else, as few.
    """
    # Index 1 is two micro-batches in flight, the fewest of any stage but the last.
    in_flight = -1 if deep else 1
    own_s = num_sequences * options.rate_s[:, 0, in_flight] + options.update_s[:, 0]
    # The most layers that a GPU's group does in time, by kind.
    layers = np.where(own_s <= step_s, np.arange(own_s.shape[1]), 0).max(axis=1)
    # A class is worth its best width.
    worths = np.zeros(len(classes))
    np.maximum.at(worths, options.gpu_class, layers / options.width)
    return _priced(worths, classes) if worths.any() else None


def _priced(worths: Floats, classes: Sequence[GpuClass]) -> Axes:
    """Return whole prices in about this proportion.  Any prices make a bound, zero too."""
    numbers = np.array([c.num_gpus for c in classes])
    priced = worths > 0
    all_worth = float(worths @ numbers)

    totals = np.arange(LEAST_PRICE, max(MOST_PRICE, round(_MOST_EACH * int(numbers.sum()))))
    # [total, class with a price]: the whole price over the worth, alike for all in proportion.
    ratios = np.maximum(np.rint(np.outer(totals, worths[priced]) / all_worth), 1.0)
    ratios /= worths[priced]
    loss = ratios.max(axis=1) / ratios.min(axis=1)
    # `argmax` finds the first, and so the lowest, total that is near enough.
    total = totals[int(np.argmax(loss <= max(loss.min(), 1.0) * _NEAR))]
    prices = np.where(priced, np.maximum(np.rint(worths * total / all_worth), 1.0), 0.0)
    steps = tuple((int(price),) for price in prices)
    return Axes(steps, (int(prices @ numbers) + 1,))
