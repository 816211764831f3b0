"""The longest step proved impossible with whole GPUs and whole replicas, for small clusters.

Prices let replicas mix as fractions.  Here the least fill of a chain is tabulated for every number
of GPUs of each class, and replicas are packed into the GPUs there are: nothing is a fraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from tools.referees.waiting.share import Share
from tools.referees.waiting.table import CapTable, Floats, Ints

_RATIO = 1.01
"""Caps this near to each other are taken together."""
_MAX_RANGES = 150
_GROWTH = 1.4
_NEAR = 1.001


class CountProver:
    """Packs replicas of the kinds of `table` into `num_gpus` GPUs of each class."""

    def __init__(self, table: CapTable, num_gpus: Sequence[int], share: Share) -> None:
        self.table = table
        self.share = share
        self.shape = tuple(n + 1 for n in num_gpus)
        self._ranges: list[tuple[float, float, Floats]] = []

    def proved_s(self, least_s: float, enough_s: float) -> float:
        """The longest step proved impossible, from `least_s` on and as far as `enough_s`."""
        low = high = least_s
        while low == high < enough_s:
            high = min(enough_s, high * _GROWTH)
            self._tabulate(high)
            if not self._is_possible(high):
                low = high
        while high > low * _NEAR:
            middle = (low + high) / 2
            if self._is_possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _tabulate(self, most_s: float) -> None:
        """The least fill for each range of caps in which there may be a chain."""
        top = most_s / max(float(self.share.scales.min()), 1.0)
        ratio = _RATIO if len(self.share.counts) == 1 else _RATIO**3
        self._ranges = []
        while len(self._ranges) < _MAX_RANGES:
            fill_s = self.least_fill_s(top)
            if not np.isfinite(fill_s).any():
                return
            self._ranges.append((top / ratio, top, fill_s))
            top /= ratio
        # The last range takes all lower caps as well.
        self._ranges[-1] = (0.0, *self._ranges[-1][1:])

    def _is_possible(self, step_s: float) -> bool:
        """Whether some packing may take no longer than that."""
        share = self.share
        value = np.full(self.shape, -np.inf)
        for low, _, fill_s in self._ranges:
            for scale, worth in zip(share.scales, share.values, strict=True):
                fits = fill_s + scale * low <= step_s
                if not fits.any():
                    break
                value = np.maximum(value, np.where(fits, worth, -np.inf))
        packed = value
        for number in range(1, share.most + 1):
            if number >= share.fewest and packed.max() >= share.demand:
                return True
            if number < share.most:
                packed = _together(packed, value)
        return False

    def least_fill_s(self, cap: float) -> Floats:
        """The least fill of a chain on so many GPUs of each class, infinite where there is none."""
        table, kinds = self.table, self.table.kinds
        total, num, depth = table.num_layers, len(kinds.width), table.depth
        inner, first, may_end = table.caps(cap)
        per_layer = kinds.layer_s + kinds.fill_s
        crossing = kinds.out_s + kinds.into_s
        least = np.full((total + 1, depth, num, *self.shape), np.inf)  # [end, stages, behind, GPUs]
        done = np.full(self.shape, np.inf)
        for kind in map(int, np.flatnonzero(table.may_be_alone([cap])[0])):
            alone_s = kinds.embedding_s[kind] + kinds.head_s[kind] + total * per_layer[kind]
            self._put(done, kind, alone_s)
        for end in range(1, total):
            for place in range(depth):
                goals = [place - 1] if place else []
                goals += [place] if place == depth - 1 else []
                for kind in range(num):
                    self._extend(least, end, place, kind, goals, (inner, first), crossing)
        for kind in range(num):
            before, after = self._taking(kind)
            for layers in range(1, min(total - 1, int(table.fits(1)[0, kind])) + 1):
                if may_end[kind, layers]:
                    own_s = layers * per_layer[kind] + kinds.head_s[kind] + table.extra_s[kind]
                    way = least[total - layers, 0, kind][before] + own_s
                    done[after] = np.minimum(done[after], way)
        return done

    def _extend(
        self,
        least: Floats,
        end: int,
        place: int,
        kind: int,
        goals: Sequence[int],
        caps: tuple[Ints, Ints],
        crossing: Floats,
    ) -> None:
        """Stages of a kind that end at layer `end`, with `place` more behind, [place, ...]."""
        table, kinds = self.table, self.table.kinds
        per_layer = float(kinds.layer_s[kind] + kinds.fill_s[kind])
        before, after = self._taking(kind)
        most = int(min(caps[0][kind].max(), table.fits(0)[place, kind], end - 1))
        if most > 0:
            window = least[end - most : end, place, kind][::-1]
            layers = np.arange(1, most + 1).reshape(-1, *(1,) * len(self.shape))
            run = np.minimum.accumulate(window + layers * per_layer, axis=0)
        for behind in range(len(kinds.width)):
            if not np.isfinite(crossing[kind, behind]):
                continue
            reach = min(most, int(caps[0][kind, behind]))
            begins = end <= min(caps[1][kind, behind], table.fits(2)[place, kind])
            for at in goals:
                goal = least[end, at, behind]
                if reach > 0:
                    way = run[reach - 1][before] + crossing[kind, behind]
                    goal[after] = np.minimum(goal[after], way)
                if begins:
                    own_s = float(kinds.embedding_s[kind]) + end * per_layer
                    self._put(goal, kind, own_s + float(crossing[kind, behind]))

    def _taking(self, kind: int) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """Slices of the GPUs before and after a stage of a kind takes its own."""
        width = int(self.table.kinds.width[kind])
        own = int(self.table.kinds.gpu_class[kind])
        before = [slice(None)] * len(self.shape)
        after = list(before)
        before[own] = slice(0, max(0, self.shape[own] - width))
        after[own] = slice(width, None)
        return tuple(before), tuple(after)

    def _put(self, goal: Floats, kind: int, seconds: float) -> None:
        """A chain begins (and may end) with this stage."""
        at = [0] * len(self.shape)
        at[int(self.table.kinds.gpu_class[kind])] = int(self.table.kinds.width[kind])
        if all(i < n for i, n in zip(at, self.shape, strict=True)):
            goal[tuple(at)] = min(goal[tuple(at)], seconds)


def _together(some: Floats, others: Floats) -> Floats:
    """Best sum of two values whose GPUs add up."""
    best = np.full(some.shape, -np.inf)
    for at in product(*(range(n) for n in some.shape)):
        if np.isfinite(others[at]):
            source = tuple(slice(0, n - i) for i, n in zip(at, some.shape, strict=True))
            target = tuple(slice(i, None) for i in at)
            best[target] = np.maximum(best[target], some[source] + others[at])
    return best
