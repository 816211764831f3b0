"""Bounds of all divisions of a case from the times of its stages alone, as if layers could be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from megatron_hetero.planner.stock.divisions import shortest_s
from megatron_hetero.planner.stock.exchange import Line
from megatron_hetero.planner.stock.least_exchange import least_exchange
from megatron_hetero.planner.stock.prices import GridPrices
from megatron_hetero.schedule.parts import SendMode


class CasePace:
    """The pace of the stages of a case, what fills its pipelines, and the least exchange.

    A `Line` of a stage is its seconds without layers, and what each layer adds.

    Args:
        prices: of the stages.
        sends: how stages wait for what they send.
    """

    def __init__(self, prices: GridPrices, sends: SendMode) -> None:
        self._prices, self._sends = prices, sends
        self._stages = range(prices.grid.num_stages)
        self._number, self._num_chunks = prices.num_micro_batches, prices.settings.num_chunks
        self._num_layers = prices.prices.problem.num_layers

    @cached_property
    def _times(self) -> list[tuple[int, list[Line]]]:
        """Each unlike replica, with the seconds of a micro-batch on its stages."""
        last, found = len(self._stages) - 1, []
        for d in self._prices.replicas:
            pieces = [self._prices.pieces(d, p) for p in self._stages]
            times = [
                (embedding.total_s * (p == 0) + head.total_s * (p == last), layer.total_s)
                for p, (layer, embedding, head) in enumerate(pieces)
            ]
            found.append((d, times))
        return found

    @cached_property
    def least_exchange(self) -> Sequence[Line]:
        """Lines below the seconds of each stage's exchange of gradients and new weights."""
        prices = self._prices
        return least_exchange(prices.grid, prices.plain, prices.rows, prices.settings.expert_groups)

    def quick_s(self, chunks: int) -> float:
        """Return what no division falls below: of `pace_s` and the fill of each replica's pipeline;
        for the case's own number of chunks up to so many."""
        return max(self.pace_s(), *(self._fill_s(d, chunks, own) for d, own in self._times))

    def pace_s(self) -> float:
        """Return the work of all stages, and the least exchange of each, in fractions of layers."""
        # Replicas run the same division: the slowest layer and the least base of any of them.
        times = np.array([times for _, times in self._times])
        base_s, each_s = times[..., 0].min(axis=0), times[..., 1].max(axis=0)
        zero_s, more_s = np.array(self.least_exchange).T
        lines = self._number * base_s + zero_s, self._number * each_s + more_s
        return float(shortest_s(*lines, self._num_layers, self._num_chunks)[0])

    def least_fills_s(self) -> list[list[tuple[float, float]]]:
        """Return for each unlike replica and stage the waits for a micro-batch, and the least time
        in which the first micro-batch comes to it and the last one goes back."""
        return [self._fills_s(d, times) for d, times in self._times]

    def _fills_s(self, d: int, times: Sequence[Line]) -> list[tuple[float, float]]:
        found, passes_s = [], 0.0
        hops_s = self._hops_s(d, self._num_chunks)
        for (base_s, each_s), (own_s, before_s) in zip(times, hops_s, strict=True):
            found.append((own_s, before_s + passes_s))
            # The first chunk of each stage before has a layer.
            passes_s += each_s + (base_s if self._num_chunks == 1 else 0.0)
        return found

    def _fill_s(self, d: int, chunks: int, times: Sequence[Line]) -> float:
        """Bound by starts: stage i begins when a forward has come through those before it, works m
        times t_i, and then a backward goes back through them: T >= m t_i + sum of (t_j + hops) over
        j < i, with t_j of the first chunks alone, and then the first stage exchanges gradients and
        weights.  A stage that waits for its sends has them in t.

        A weighted mean of these holds too; the weights (not negative) make a layer count for at
        least one wherever it lies.
        """
        hops_s = self._hops_s(d, chunks)
        # From the last stage to the first, so that a stage knows the weights behind it.
        weights = fixed_s = 0.0
        number, is_whole = self._number, chunks == 1
        both = zip(reversed(times), reversed(hops_s), self._stages[::-1], strict=True)
        for (base_s, each_s), (own_s, before_s), p in both:
            # After all that comes the exchange of the first stage, whatever stage it is behind.
            zero_s, more_s = self.least_exchange[0] if p == 0 else (0.0, 0.0)
            # As much weight as makes a layer of this stage count for one, beside the later weights.
            left = 1 - weights * (each_s / chunks + more_s)
            weight = max(0.0, left / (number * each_s + more_s))
            # The ends of the model may lie on other chunks than the first.
            fixed_s += (base_s + own_s) * number * weight + is_whole * base_s * weights
            fixed_s += before_s * weight
            weights += weight
            fixed_s += zero_s * weights
        return (self._num_layers + fixed_s) / weights

    def _hops_s(self, d: int, chunks: int) -> list[tuple[float, float]]:
        """Return for each stage of a replica the seconds for which it waits for its own sends of a
        micro-batch, and those of the boundaries before it, there and back, without these waits; for
        its own number of chunks up to so many."""
        boundaries_s = self._prices.boundaries_s(d)
        there_s = [0.0, *(there_s for there_s, _ in boundaries_s), 0.0]
        back_s = [0.0, *(back_s for _, back_s in boundaries_s)]
        found, before_s = [], 0.0
        for p in self._stages:
            # A message there belongs to the stage before, one back to this stage.
            before_s += there_s[p] + back_s[p]
            if self._sends == "waited" and chunks == 1:
                found.append((there_s[p + 1] + back_s[p], before_s - back_s[p]))
            else:
                found.append((self._chunk_waits_s(d, p), before_s))
        return found

    def _chunk_waits_s(self, d: int, p: int) -> float:
        """Return the seconds of a micro-batch for which an interleaved stage waits for what its
        forward passes send; its backward passes go on."""
        if self._sends != "overlapped":
            return 0.0
        # The last stage sends back to the first what all chunks but its last one make.
        is_last = p + 1 == len(self._stages)
        to, number = (0, self._num_chunks - 1) if is_last else (p + 1, self._num_chunks)
        return number * sum(self._prices.crossing_s(d, p, to))
