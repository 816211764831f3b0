"""The cheapest chain of stages under a cap on every stage: a table over layers, for many caps at
once.

A chain's price is that of its GPUs plus `weight` for each of its fill seconds: what all stages
take for one micro-batch, boundaries included.  Two facts keep the table small: fewer layers are
never dearer at the same price of fill, so a stage takes any number up to its cap by a running
minimum; and a cap depends on the stage, the stage behind it and the layers behind that alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

_MAX_DEPTH = 6

PLACES = ((False, False), (False, True), (True, False), (True, True))
"""Whether a stage is the first, the last; a place's index is 2 * first + last."""


@dataclass(frozen=True)
class StageKinds:
    """All ways to make a stage, and what they take at least; arrays have shape [kind] first.

    A kind is a group of `width` GPUs of class `gpu_class`.
    """

    gpu_class: Ints
    width: Ints
    layer_s: Floats
    """Of one layer and micro-batch, forward and backward."""
    embedding_s: Floats
    head_s: Floats
    fill_s: Floats
    """What a layer adds to the step beside its own time, once."""
    exchange_s: Floats
    """Exchange of a stage of so many layers, [kind, 2 * first + last, layers]."""
    out_s: Floats
    """What a boundary adds to the stage before it, [kind, kind behind]."""
    into_s: Floats
    """What a boundary adds to the stage behind it, [kind before, kind]."""
    into_last_s: Floats
    """The same where that stage is the last."""
    max_layers: Ints
    """Layers that fit, [kind, micro-batches in flight - 1, 2 * first + last]."""

    @property
    def least_into_s(self) -> Floats:
        """The least of `into_s` over the stages before, [kind]."""
        least: Floats = self.into_s.min(axis=0)
        return least

    @property
    def least_into_last_s(self) -> Floats:
        """The least of `into_last_s` over the stages before, [kind]."""
        least: Floats = self.into_last_s.min(axis=0)
        return least


@dataclass(frozen=True)
class FoundChain:
    """A chain as (kind, layers) stage by stage."""

    stages: tuple[tuple[int, int], ...]


class CapTable:
    """Cheapest chains of `num_layers` layers whose stages s all have

        periods * t_s + x_s <= cap

    with t_s the stage's seconds for a micro-batch and x_s its exchange.
    """

    def __init__(self, kinds: StageKinds, num_layers: int, periods: float) -> None:
        self.kinds = kinds
        self.num_layers = num_layers
        self.periods = periods
        self.work = 0
        """Numbers computed so far."""
        layers = np.arange(num_layers + 1)[None, :]
        ends_s = (kinds.embedding_s, kinds.head_s)
        loads: list[Floats] = []
        for place in range(4):
            first, last = divmod(place, 2)
            seconds = layers * kinds.layer_s[:, None]
            seconds = seconds + first * ends_s[0][:, None] + last * ends_s[1][:, None]
            if not first:
                into = kinds.least_into_last_s if last else kinds.least_into_s
                seconds = seconds + np.where(np.isfinite(into), into, 0.0)[:, None]
            loads.append(periods * seconds + kinds.exchange_s[:, place])
        self.loads = loads
        extra_s = kinds.least_into_last_s - kinds.least_into_s
        self.extra_s = np.where(np.isfinite(extra_s), np.maximum(extra_s, 0.0), 0.0)
        """What the last stage's boundary adds at least beyond that of an inner one, [kind]."""
        self.depth = _depth(kinds.max_layers)
        """Stages from one to the last are told apart up to this many; more count as so many."""
        self._fits = [
            np.ascontiguousarray(kinds.max_layers[:, : self.depth, place].T)
            for place in range(len(PLACES))
        ]

    def fits(self, place: int) -> Ints:
        """Layers that memory allows a stage, [stages from it to the last - 1, kind]."""
        return self._fits[place]

    def caps(self, cap: float) -> tuple[Ints, Ints, npt.NDArray[np.bool_]]:
        """Layers that an inner and a first stage may have, [kind, kind behind], and whether a last
        one may have so many, [kind, layers]."""
        kinds, num = self.kinds, len(self.kinds.width)
        slack = cap * (1 + 1e-9)
        with np.errstate(invalid="ignore"):
            room = slack - self.periods * kinds.out_s
        inner, first = np.zeros((num, num), np.int64), np.zeros((num, num), np.int64)
        for kind in range(num):
            for table, place in ((inner, 0), (first, 2)):
                # Non-decreasing in the layers; entry 0 counts no layer.
                found = np.searchsorted(self.loads[place][kind, 1:], room[kind], "right")
                table[kind] = np.where(np.isfinite(kinds.out_s[kind]), found, 0)
        return inner, first, self.loads[1] <= slack

    def cheapest(
        self, caps: Sequence[float], prices: Floats, weights: Floats
    ) -> tuple[Floats, Floats]:
        """Least price of a chain, [cap, weight], infinite where there is none; and the table.

        Args:
            prices: of one GPU of each class.
            weights: prices of a fill second, [cap, weight].
        """
        kinds, total, depth = self.kinds, self.num_layers, self.depth
        num_caps, num_weights = weights.shape
        num = len(kinds.width)
        tables = [self.caps(cap) for cap in caps]
        inner = np.stack([t[0] for t in tables])[:, None]  # [cap, -, kind, behind]
        first = np.stack([t[1] for t in tables])[:, None]
        may_end = np.stack([t[2] for t in tables])
        inner = np.minimum(inner, self.fits(0)[None, :, :, None])  # [cap, stages, kind, behind]
        first = np.minimum(first, self.fits(2)[None, :, :, None])
        gpus = prices[kinds.gpu_class] * kinds.width
        per_layer = kinds.layer_s + kinds.fill_s
        weight = weights[:, :, None, None]
        with np.errstate(invalid="ignore"):
            base = gpus[:, None] + weight * (kinds.out_s + kinds.into_s)
        base[~np.isfinite(base)] = np.inf
        base = base[:, :, None]  # [cap, weight, -, kind, behind]
        weight = weight[..., None]
        least = np.full((num_caps, num_weights, total + 1, depth, num), np.inf)
        b, q, j, k = np.ix_(*(range(n) for n in (num_caps, num_weights, depth, num)))
        at = (b[..., None], q[..., None], j[..., None], k[..., None])
        most = max(1, int(inner.max()))
        for end in range(1, total):
            price = weight[..., 0] * (kinds.embedding_s + end * per_layer)[None, None, None, :]
            ways = np.where((first >= end)[:, None], price[..., None] + base, np.inf)
            reach = min(most, end - 1)
            if reach:
                window = least[:, :, end - reach : end][:, :, ::-1]  # by layers 1, 2, ...
                by_layers = np.arange(1, reach + 1)[:, None, None] * per_layer
                run = np.minimum.accumulate(window + weight * by_layers, axis=2)
                allowed = np.minimum(inner, reach)[:, None]
                picked = run[at[0], at[1], np.maximum(allowed - 1, 0), at[2], at[3]]
                ways = np.minimum(ways, np.where(allowed > 0, picked + base, np.inf))
            least[:, :, end] = self._behind(ways.min(axis=3))
            self.work += ways.size * 2 + least[:, :, :reach].size
        layers = total - np.arange(total + 1)
        ends = may_end[:, :, layers] & (layers <= self.fits(1)[0][:, None])
        closing = (
            least[:, :, :, 0]
            + gpus
            + weight[..., 0] * (layers[:, None] * per_layer + kinds.head_s + self.extra_s)
        )
        closing = np.where(ends.transpose(0, 2, 1)[:, None, :, :], closing, np.inf)
        closing = closing[:, :, 1:total]
        alone_s = kinds.embedding_s + kinds.head_s + total * per_layer
        lone = np.where(
            self.may_be_alone(caps)[:, None], gpus + weights[:, :, None] * alone_s, np.inf
        ).min(axis=2)
        if total == 1:
            return lone, least
        return np.minimum(closing.reshape(num_caps, num_weights, -1).min(axis=2), lone), least

    def may_be_alone(self, caps: Sequence[float]) -> npt.NDArray[np.bool_]:
        """Whether one stage may hold all layers, [cap, kind]."""
        slack = np.asarray(caps)[:, None] * (1 + 1e-9)
        found: npt.NDArray[np.bool_] = (self.loads[3][None, :, self.num_layers] <= slack) & (
            self.fits(3)[0] >= self.num_layers
        )
        return found

    def _behind(self, found: Floats) -> Floats:
        """From the stages from one to the last, [..., stages - 1, kind], to those from the next."""
        after = np.full_like(found, np.inf)
        after[..., :-1, :] = found[..., 1:, :]
        # At `depth` there may be any number more.
        after[..., -1, :] = np.minimum(after[..., -1, :], found[..., -1, :])
        return after

    def chain(self, cap: float, prices: Floats, weight: float, least: Floats) -> FoundChain:
        """A cheapest chain; `least` is the table of `cheapest` for this cap and weight."""
        kinds, total = self.kinds, self.num_layers
        inner, first, may_end = self.caps(cap)
        gpus = prices[kinds.gpu_class] * kinds.width
        per_layer = kinds.layer_s + kinds.fill_s
        best: tuple[float, int, int] = (np.inf, 0, 0)
        for kind in range(len(kinds.width)):
            if self.may_be_alone([cap])[0, kind]:
                alone = kinds.embedding_s[kind] + kinds.head_s[kind] + total * per_layer[kind]
                best = min(best, (gpus[kind] + weight * alone, 0, kind))
            for end in range(1, total):
                layers = total - end
                if may_end[kind, layers] and layers <= self.fits(1)[0, kind]:
                    last = layers * per_layer[kind] + kinds.head_s[kind] + self.extra_s[kind]
                    best = min(best, (least[end, 0, kind] + gpus[kind] + weight * last, end, kind))
        _, end, kind = best
        stages, place = [(kind, total - end)], 0
        while end:
            ways: list[tuple[float, int, int, int]] = []
            crossing = kinds.out_s[:, kind] + kinds.into_s[:, kind]
            # The stages from the one before to the last; at `depth` there may be any number.
            for at in {min(place + 1, self.depth - 1), place if place == self.depth - 1 else -1}:
                for before in range(len(kinds.width)) if at >= 0 else ():
                    if not np.isfinite(crossing[before]):
                        continue
                    base = gpus[before] + weight * crossing[before]
                    if end <= min(first[before, kind], self.fits(2)[at, before]):
                        own = kinds.embedding_s[before] + end * per_layer[before]
                        ways.append((base + weight * own, end, before, at))
                    most = min(inner[before, kind], self.fits(0)[at, before], end - 1)
                    for layers in range(1, most + 1):
                        own = least[end - layers, at, before]
                        own += weight * layers * per_layer[before]
                        ways.append((base + own, layers, before, at))
            _, layers, kind, place = min(ways)
            end -= layers
            stages.append((kind, layers))
        return FoundChain(tuple(reversed(stages)))


def _depth(max_layers: Ints) -> int:
    """Micro-batches in flight from which on memory allows the same; a few at most."""
    same = [bool((max_layers[:, i:] == max_layers[:, i : i + 1]).all()) for i in range(_MAX_DEPTH)]
    return 1 + same.index(True) if True in same else min(_MAX_DEPTH, max_layers.shape[1])
