"""Tables of chains along a long axis of prices, as large clusters have.

Cheap chains are tabulated by single units of the price, dearer ones by ever larger units, so that a
table grows with the logarithm of the cluster.

In units of u, a stage of price p counts floor(p / u), and all stages of a chain of price P count at
most floor(P / u) together.  So the least time of all chains of that many larger units is no more
than that of any chain of price P, and the table stays a lower bound.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from megatron_hetero.bounds.chains.axes import Axes
from megatron_hetero.bounds.chains.dominance import needed_options
from megatron_hetero.bounds.chains.least_chains import ChainTimes
from megatron_hetero.bounds.chains.stages import ChainStageOptions, Floats, Ints

_NUM_UNITS = 320
"""Entries of a table of one unit."""
_SLACK = 1.25
"""So many times more if no other unit follows."""
_COARSER = 4
"""The next unit is so many times larger."""


def chain_times(
    options: ChainStageOptions,
    num_layers: int,
    axes: Axes,
    ranges: Sequence[tuple[int, int]],
    cut_s: float,
) -> tuple[Floats, int]:
    """Return least times of chains that take no more than so much, [range, *axes.shape], and the
    numbers looked at; see `ChainTimes.least_s`."""
    # [kind, axis]: what a stage of a kind takes, its width times a GPU's step.
    taken = np.array(axes.steps)[options.gpu_class] * options.width[:, None]
    if len(axes.shape) > 1:
        return _tabulated(options, num_layers, axes.shape, taken, ranges, cut_s)
    (length,), found, begin, work = axes.shape, [], 0, 0
    # Each unit tabulates the prices from the end of the unit before to its own end.
    for unit, end in _levels(length, num_layers * int(taken.max(initial=0))):
        entries = np.arange(begin, end) // unit
        shape = (int(entries[-1]) + 1,)
        least_s, numbers = _tabulated(options, num_layers, shape, taken // unit, ranges, cut_s)
        found.append(least_s[:, entries])
        work += numbers
        begin = end
    # Beyond the dearest chain more of the cluster helps nobody.
    found.append(np.repeat(found[-1][:, -1:], length - begin, axis=1))
    return np.concatenate(found, axis=1), work


def _levels(length: int, dearest: int) -> Iterator[tuple[int, int]]:
    """Yield each unit, and the price up to which the unit is used (exclusive); no chain costs more
    than `dearest`, since every stage has a layer."""
    unit, most = 1, min(length, dearest + 1)
    while most > unit * _NUM_UNITS * _SLACK:
        yield unit, unit * _NUM_UNITS
        unit *= _COARSER
    yield unit, most


def _tabulated(
    options: ChainStageOptions,
    num_layers: int,
    shape: tuple[int, ...],
    taken: Ints,
    ranges: Sequence[tuple[int, int]],
    cut_s: float,
) -> tuple[Floats, int]:
    # Options that the group's least sequences or more may need serve all ranges of the group.
    few, few_taken = needed_options(options, taken, ranges[0][0], cut_s)
    if not len(few.width):
        return np.full((len(ranges), *shape), np.inf), 0
    chains = ChainTimes(few, num_layers, shape, few_taken)
    return chains.least_s(ranges, cut_s), chains.work
