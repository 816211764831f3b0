"""The shortest step in which whole replicas do all the work.

Replicas are packed into the GPUs of the cluster, or into the price of all GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron_hetero.bounds.chains.least_chains import MAX_NUMBERS
from megatron_hetero.bounds.chains.stages import Floats, Ints
from megatron_hetero.rounding import ROUNDING, at_most

_NEAR = 1.001
_MAX_PACKED = 1_000
"""Up to so many units of price replicas are packed whole."""


@dataclass(frozen=True)
class ReplicaTimes:
    """Replicas that do `ranges[i]` sequences (least and most), always a multiple of `each`; one
    that does the most takes `least_s[i]` at least on so many GPUs of each class, and one that does
    fewer takes no less for each of them."""

    ranges: Ints
    each: int
    least_s: Floats

    def most(self, step_s: float) -> Floats:
        """Return the most sequences that may be done in a step, by GPUs of each class."""
        # One axis for ranges, then the axes of GPUs.
        least, most = (ends.reshape(-1, *(1,) * (self.least_s.ndim - 1)) for ends in self.ranges.T)
        # Sequences are in proportion to the step at most; `ROUNDING` keeps exact multiples whole.
        done = np.floor(most // self.each * (step_s / self.least_s) * (1 + ROUNDING)) * self.each
        value: Floats = np.where(done >= least, np.minimum(done, most), 0.0).max(axis=0)
        return value


def least_packed_s(
    sizes: Sequence[ReplicaTimes],
    num_sequences: int,
    num_replicas: tuple[int, int],
    low_s: float,
    high_s: float,
) -> float:
    """Return a step from `low_s` to `high_s` that no packing beats.

    Args:
        num_replicas: so many at least, and at most (allowed here: up to the next power of two
            beyond the least).
    """
    # Even the longest step is too short: all of it is proved impossible.
    if not _is_possible(sizes, num_sequences, num_replicas, high_s):
        return high_s
    while high_s > low_s * _NEAR:
        middle_s = (low_s + high_s) / 2
        if _is_possible(sizes, num_sequences, num_replicas, middle_s):
            high_s = middle_s
        else:
            low_s = middle_s
    return low_s


def _is_possible(
    sizes: Sequence[ReplicaTimes],
    num_sequences: int,
    num_replicas: tuple[int, int],
    step_s: float,
) -> bool:
    fewest, most = num_replicas
    # [GPUs of each class], the most sequences of one replica in the step.
    value = np.maximum.reduce([size.most(step_s) for size in sizes])
    if value.ndim == 1 and len(value) > _MAX_PACKED:
        return at_most(num_sequences, _most_of_many(value, most))
    # A replica does something: where there is none for so few GPUs, there is no packing.
    value = np.where(value > 0, value, -np.inf)
    # Powers of two by squaring: `packed` is the best of exactly `fewest` replicas.
    packed, power, left = None, value, fewest
    while left:
        if left % 2:
            packed = power if packed is None else _together(packed, power)
        left //= 2
        if left:
            power = _together(power, power)
    if packed is None:
        raise ValueError(f"no replicas at least: {num_replicas}")
    # Each further replica may also do nothing, so that numbers may double past `most`.
    more, number = np.maximum(value, 0.0), 1
    while fewest < most and packed.flat[-1] < num_sequences:
        packed = _together(packed, more)
        fewest += number
        more, number = _together(more, more), 2 * number
    return bool(packed.flat[-1] >= num_sequences)


def _together(some: Floats, others: Floats) -> Floats:
    """Return the best sum of two values whose GPUs add up; both grow along every axis."""
    rises = others > -np.inf
    for axis in range(others.ndim):
        # One GPU fewer would do as well: another place has it.
        rising, along = rises.swapaxes(axis, 0), others.swapaxes(axis, 0)
        rising[1:] &= along[1:] != along[:-1]
    # The -inf in front stands for fewer GPUs than none, so that every difference has a place.
    padded = np.full([2 * n - 1 for n in some.shape], -np.inf)
    padded[tuple(slice(n - 1, None) for n in some.shape)] = some
    places = _padded_places(some.shape)
    best = np.full(some.size, -np.inf)
    chosen = np.flatnonzero(rises)
    # Pairs of cells are added in parts of about `MAX_NUMBERS`, which keeps arrays small.
    for part in np.array_split(chosen, len(chosen) * some.size // MAX_NUMBERS + 1):
        if len(part):
            rest = padded.ravel()[places[-1] + places - places[part][:, None]]
            best = np.maximum(best, (rest + others.ravel()[part][:, None]).max(axis=0))
    return best.reshape(some.shape)


@lru_cache
def _padded_places(shape: tuple[int, ...]) -> Ints:
    """Return where the cells of an array are in one of nearly twice the length along every axis."""
    places: Ints = np.ravel_multi_index(np.indices(shape), [2 * n - 1 for n in shape]).ravel()
    return places


def _most_of_many(value: Floats, num_replicas: int) -> float:
    """Return the most that `num_replicas` replicas or fewer do, at prices that sum to the last
    price.

    With h the least concave function that no value is above, n replicas do
    sum h(p_r) <= n h(P / n) at most (Jensen's inequality), and more if n is larger.
    """
    # The least concave function above all values: the upper hull of their points.
    hull = [(0.0, float(value[0]))]
    # Only prices at which the value rises can be corners of the hull.
    for price in (np.flatnonzero(np.diff(value) > 0) + 1).tolist():
        point = price, float(value[price])
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-1], point):
            hull.pop()
        hull.append(point)
    # By Jensen's inequality all replicas at the mean price do most.
    prices, values = zip(*hull, strict=True)
    return num_replicas * float(np.interp((len(value) - 1) / num_replicas, prices, values))


def _slope(one: tuple[float, float], other: tuple[float, float]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])
