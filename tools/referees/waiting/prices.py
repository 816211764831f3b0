"""The longest step that prices of GPUs prove impossible, for pipelines that fill and drain.

One `Prover` is for one range of replica numbers.  It keeps the chains met so far; a linear
programme over them gives prices, and a `CapTable` the cheapest chains at these prices: either none
is cheap enough to do its share in the step asked for, which is a proof, or the new ones make better
prices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from tools.referees.waiting.rules import Room
from tools.referees.waiting.share import Share
from tools.referees.waiting.table import CapTable, Floats, FoundChain, StageKinds

_WEIGHTS = np.array([0.0, 0.4, 0.8, 1.2, 1.7, 2.4, 3.4])
"""Prices of a fill second that are tried, in parts of 1 / cap."""
_CAPS = (0.0, 1 / 32, 1 / 8, 1 / 4, 1 / 2, 0.7, 0.85, 1.0)
"""Edges of the ranges of caps that a proof begins with, in parts of the largest."""
_FINEST = 1.01
"""Caps nearer to each other than this ratio are not told apart."""
_PARTS = 4
"""A range that hinders is cut into so many."""
_NEAR = 1.003
_LONGEST = 16.0


@dataclass(frozen=True)
class _Row:
    """A chain met: its GPUs of each class, and the step of each count of micro-batches."""

    gpus: tuple[int, ...]
    steps_s: Floats


class Prover:
    """See above; `proved_s` is what was proved so far."""

    def __init__(
        self,
        kinds: StageKinds,
        num_layers: int,
        num_gpus: Sequence[int],
        share: Share,
        least_s: float,
        parent: Prover | None = None,
    ) -> None:
        self.kinds = kinds
        self.num_gpus = np.array(num_gpus, float)
        self.share = share
        self.proved_s = least_s
        self.limit_s = _LONGEST * least_s
        self.table = CapTable(kinds, num_layers, share.periods)
        self._rows: dict[FoundChain, _Row] = {}
        speeds = np.zeros(len(num_gpus))
        rates = 1 / (kinds.width * (kinds.layer_s + 1e-30))
        np.maximum.at(speeds, kinds.gpu_class, rates)
        self._caps = _CAPS
        self.finest = _FINEST
        self.weights = _WEIGHTS[:: 2 if share.is_alike else 1]
        self._prices = self._scaled(np.array([*speeds, 0.0]))
        if parent is not None:
            self._rows = {chain: self._row(chain) for chain in parent._rows}
            if self._total(parent._prices) > 0:
                self._prices = self._scaled(parent._prices)
        self.done = False

    def _total(self, prices: Floats) -> float:
        extra = max(prices[-1] * self.share.fewest, prices[-1] * self.share.most)
        return float(prices[:-1] @ self.num_gpus + extra)

    def _scaled(self, prices: Floats) -> Floats:
        """Prices at which all GPUs together cost just less than the demand."""
        scaled: Floats = prices * ((1 - 1e-6) * self.share.demand / self._total(prices))
        return scaled

    def run(self, enough_s: float, max_rounds: int, finest: float = _FINEST) -> None:
        """Prove as much as can be, or a step of `enough_s`.

        Args:
            finest: ratio of caps that are not told apart further.
        """
        self.finest = finest
        pool_s = self.limit_s
        for number in range(max_rounds):
            evaluated = self._prove(pool_s)
            if self.proved_s >= pool_s / _NEAR:
                break
            if self.proved_s >= enough_s:
                return
            known = len(self._rows)
            self._add_chains(evaluated, pool_s)
            # The first prices may be those of another range, and its chains all known.
            if len(self._rows) == known and number:
                break
            pool_s, prices = self._pool_s(self.proved_s, pool_s)
            if prices is not None and self._total(prices) > 0:
                self._prices = self._scaled(prices)
        self.done = True

    def room(self, step_s: float) -> Room:
        """What the replicas of a plan that takes no longer than `step_s` can have."""
        ones = np.ones(len(self.num_gpus))
        none = np.zeros((1, 1))
        gpus, _ = self.table.cheapest([step_s], ones, none)
        price, _ = self.table.cheapest([step_s], self._prices[:-1], none)
        dearest = float(self._prices[:-1] @ self.num_gpus)
        return Room(
            self.share.fewest,
            int(self.num_gpus.sum()),
            int(min(gpus[0, 0], 1 + self.num_gpus.sum())),
            dearest / max(float(self._prices[:-1].min()), 1e-12),
            float(price[0, 0]) / max(float(self._prices[:-1].min()), 1e-12),
        )

    def _prove(self, most_s: float) -> _Evaluated:
        """Raise `proved_s` to what the prices prove; narrow the caps that hinder."""
        at = _Evaluated(self, self._caps, most_s)
        while True:
            proved_s = at.proved_s(self.proved_s, most_s)
            self.proved_s = max(self.proved_s, proved_s)
            if self.proved_s >= most_s / _NEAR:
                return at
            wide = at.hindering(self.proved_s * _NEAR)
            if not wide:
                return at
            at.split(wide)

    def _add_chains(self, at: _Evaluated, step_s: float) -> None:
        for chain in at.bargains(step_s):
            if chain not in self._rows:
                self._rows[chain] = self._row(chain)

    def _row(self, chain: FoundChain) -> _Row:
        kinds, last = self.kinds, len(chain.stages) - 1
        gpus = [0] * len(self.num_gpus)
        stages, fill_s = [], 0.0
        for s, (kind, layers) in enumerate(chain.stages):
            gpus[kinds.gpu_class[kind]] += int(kinds.width[kind])
            own_s = layers * kinds.layer_s[kind]
            own_s += kinds.embedding_s[kind] * (s == 0) + kinds.head_s[kind] * (s == last)
            if s:
                into = kinds.into_last_s if s == last else kinds.into_s
                own_s += into[chain.stages[s - 1][0], kind]
            if s < last:
                own_s += kinds.out_s[kind, chain.stages[s + 1][0]]
            fill_s += own_s + layers * kinds.fill_s[kind]
            stages.append((own_s, kinds.exchange_s[kind, 2 * (s == 0) + (s == last), layers]))
        further = np.array([t for t, _ in stages])[:, None] * (self.share.counts - 1)
        exchanges_s = np.array([x for _, x in stages])[:, None]
        return _Row(tuple(gpus), float(fill_s) + (further + exchanges_s).max(axis=0))

    def _value(self, row: _Row, step_s: float) -> float:
        """What a chain counts for in a step."""
        fits = int(np.searchsorted(row.steps_s, step_s, "right"))
        if not fits:
            return 0.0
        return 1.0 if self.share.is_alike else float(self.share.counts[fits - 1])

    def _pool_s(self, least_s: float, most_s: float) -> tuple[float, Floats | None]:
        """The shortest step that the chains met allow, and the prices just below it."""
        low, high, best = least_s, most_s, None
        while high > low * (1 + 3e-4):
            middle = (low + high) / 2
            prices = self._dual(middle)
            if prices is None:
                high = middle
            else:
                low, best = middle, prices
        return high, best

    def _dual(self, step_s: float) -> Floats | None:
        """Prices that prove a step impossible for the chains met; None if they can do it."""
        from scipy.optimize import linprog  # a third of a second

        rows = [(row, self._value(row, step_s)) for row in self._rows.values()]
        rows = [(row, value) for row, value in rows if value]
        if not rows:
            return self._prices  # none of them does anything in this step
        free = not self.share.is_alike
        a = [[-float(g) for g in row.gpus] + ([-1.0, 1.0] if free else []) for row, _ in rows]
        cost = [*self.num_gpus, *([self.share.most, -float(self.share.fewest)] if free else [])]
        found = linprog(
            cost, A_ub=a, b_ub=[-value for _, value in rows], bounds=(0, 1e9), method="highs"
        )
        if found.x is None or found.fun >= self.share.demand * (1 - 1e-9):
            return None
        prices = np.array(found.x)
        if not free:
            return np.array([*(prices + 1e-12), 0.0])
        return np.array([*(prices[:-2] + 1e-12), prices[-2] - prices[-1]])


class _Evaluated:
    """Cheapest chains at the prover's prices, by ranges of caps."""

    def __init__(self, prover: Prover, parts: Sequence[float], most_s: float) -> None:
        self.prover = prover
        top = most_s / max(self.prover.share.scales[0], 1.0)
        edges = [part * top for part in parts]
        self.low: list[float] = []
        self.high: list[float] = []
        self.price: list[Floats] = []
        self.table: list[Floats] = []
        self._add(list(pairwise(edges)))

    def _add(self, ranges: list[tuple[float, float]]) -> None:
        prover = self.prover
        highs = [high for _, high in ranges]
        weights = np.outer(1 / np.array(highs), prover.weights)
        price, table = prover.table.cheapest(highs, prover._prices[:-1], weights)
        self.low += [low for low, _ in ranges]
        self.high += highs
        self.price += list(price)
        self.table += list(table)

    def _missing(self, step_s: float) -> Floats:
        """How much less than its value the cheapest chain costs, [range, count]."""
        prover = self.prover
        low, high = np.array(self.low), np.array(self.high)
        weights = np.outer(1 / high, prover.weights)
        budget = step_s - np.outer(low, prover.share.scales)  # [range, count]
        price = np.stack(self.price)
        least = (price[:, None, :] - weights[:, None, :] * budget[:, :, None]).max(axis=2)
        missing: Floats = prover.share.values - prover._prices[-1] - least
        missing[budget < 0] = -np.inf
        return missing

    def proved_s(self, least_s: float, most_s: float) -> float:
        """The longest step up to `most_s` that is proved; zero if not even `least_s` is."""
        if self._missing(most_s).max() <= 0:
            return most_s
        if self._missing(least_s).max() > 0:
            return 0.0
        low, high = least_s, most_s
        while high > low * (1 + 1e-4):
            middle = (low + high) / 2
            if self._missing(middle).max() <= 0:
                low = middle
            else:
                high = middle
        return low

    def hindering(self, step_s: float) -> list[int]:
        """Ranges that hinder the proof of a step and can be told apart further; empty if one that
        cannot hinders too."""
        missing = self._missing(step_s).max(axis=1)
        bad = [i for i in range(len(self.low)) if missing[i] > 0]
        wide = [i for i in bad if self.high[i] > self.prover.finest * self.low[i]]
        return wide if len(wide) == len(bad) else []

    def split(self, ranges: Sequence[int]) -> None:
        """Cut ranges."""
        parts = []
        for i in ranges:
            low, high = self.low[i], self.high[i]
            least = low or high / 2**_PARTS
            edges = np.geomspace(least, high, _PARTS + 1)
            edges[0], edges[-1] = low, high
            parts += list(pairwise(map(float, edges)))
        for i in sorted(ranges, reverse=True):
            for rows in (self.low, self.high, self.price, self.table):
                del rows[i]
        self._add(parts)

    def bargains(self, step_s: float) -> list[FoundChain]:
        """Chains that hinder most."""
        missing = self._missing(step_s).max(axis=1)
        order = sorted(range(len(self.low)), key=lambda i: -missing[i])
        found = []
        prover = self.prover
        for i in order[:4]:
            if missing[i] <= 0:
                break
            for q, part in enumerate(prover.weights):
                if np.isfinite(self.price[i][q]):
                    found.append(
                        prover.table.chain(
                            self.high[i],
                            prover._prices[:-1],
                            part / self.high[i],
                            self.table[i][q],
                        )
                    )
        return list(dict.fromkeys(found))
