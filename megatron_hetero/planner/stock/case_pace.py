"""Bounds of all divisions of a case from the times of its stages alone, as if layers could be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.planner.stock.divisions import shortest_s
from megatron_hetero.planner.stock.exchange import Line
from megatron_hetero.planner.stock.least_exchange import (
    beyond_passes,
    least_exchange,
    num_hiding,
)
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
    def _times(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds of a micro-batch without layers, and of each layer, [unlike replica, stage]."""
        each_s, embedding_s, head_s = self._prices.stages.figures(self._pieces_s).T
        base_s = np.zeros_like(each_s)
        base_s[0] += embedding_s[0]
        base_s[-1] += head_s[-1]
        return base_s.T, each_s.T

    def _pieces_s(self, number: int) -> list[float]:
        return [piece.total_s for piece in self._prices.pieces(number)]

    @cached_property
    def least_exchange(self) -> Sequence[Line]:
        """Lines below the seconds of each stage's exchange of gradients and new weights."""
        prices = self._prices
        return least_exchange(prices.grid, prices.plain, prices.rows, prices.settings.expert_groups)

    def num_hiding(self, chunks: int) -> NDArray[np.int64]:
        """Return the micro-batches whose passes may hide a stage's exchange, [stage]; with up to so
        many chunks."""
        training = self._prices.prices.problem.workload.training
        return np.minimum(num_hiding(training, len(self._stages), chunks), self._number)

    @property
    def _typical(self) -> float:
        return self._num_layers / len(self._stages)

    def _left_of_first_s(self, chunks: int, base_s: float, each_s: float) -> Line:
        """Return a line below what is left of the first stage's exchange when all passes are done.

        Args:
            base_s, each_s: of a micro-batch on the stage, without layers and of each.
        """
        number = self.num_hiding(chunks)[0]
        if number and chunks > 1:
            # The first of several chunks may begin its exchange long before the passes end.
            return 0.0, 0.0
        if not number:
            return self.least_exchange[0]
        zero_s, more_s = beyond_passes(self.least_exchange[0], (base_s, each_s), self._typical)
        return float(zero_s), float(more_s)

    def quick_s(self, chunks: int) -> float:
        """Return what no division falls below: of `pace_s` and the fill of each replica's pipeline;
        for the case's own number of chunks up to so many."""
        # A number at a time: few replicas are unlike, for which arrays are slower.
        every = (own.tolist() for own in (*self._times, *self._hops_s(chunks)))
        replicas = zip(*every, strict=True)
        return max(self.pace_s(chunks), *(self._fill_s(chunks, *replica) for replica in replicas))

    def pace_s(self, chunks: int) -> float:
        """Return the work of all stages, and the least exchange of each behind it, in fractions of
        layers; for the case's own number of chunks up to so many."""
        # Replicas run the same division: the slowest layer and the least base of any of them.
        base_s, each_s = self._times[0].min(axis=0), self._times[1].max(axis=0)
        number = self.num_hiding(chunks)
        zero_s, more_s = np.array(self.least_exchange).T
        hiding = number * base_s, number * each_s
        zero_s, more_s = beyond_passes((zero_s, more_s), hiding, self._typical)
        lines = self._number * base_s + zero_s, self._number * each_s + more_s
        return float(shortest_s(*lines, self._num_layers, self._num_chunks)[0])

    def least_fills_s(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the waits for a micro-batch, and the least time in which the first micro-batch
        comes to a stage and the last one goes back, [unlike replica, stage]."""
        base_s, each_s = self._times
        own_s, before_s = self._hops_s(self._num_chunks)
        # The first chunk of each stage before has a layer.
        passes_s = each_s + base_s if self._num_chunks == 1 else each_s
        before_s[:, 1:] += np.cumsum(passes_s, axis=1)[:, :-1]
        return own_s, before_s

    def _fill_s(self, chunks: int, *times: list[float]) -> float:
        """Bound by starts: stage i begins when a forward has come through those before it, works m
        times t_i, and then a backward goes back through them: T >= m t_i + sum of (t_j + hops) over
        j < i, with t_j of the first chunks alone, and then the first stage exchanges gradients and
        weights.  A stage that waits for its sends has them in t.

        A weighted mean of these holds too; the weights (not negative) make a layer count for at
        least one wherever it lies.

        Args:
            times: `_times` and `_hops_s` of a replica.
        """
        # From the last stage to the first, so that a stage knows the weights behind it.
        weights = fixed_s = 0.0
        number, is_whole = self._number, chunks == 1
        stages = zip(*times, self._stages, strict=True)
        for base_s, each_s, own_s, before_s, p in reversed(list(stages)):
            # After all that comes the exchange of the first stage, whatever stage it is behind.
            zero_s, more_s = (
                self._left_of_first_s(chunks, base_s, each_s) if p == 0 else (0.0, 0.0)
            )
            # As much weight as makes a layer of this stage count for one, beside the later weights.
            left = 1 - weights * (each_s / chunks + more_s)
            weight = max(0.0, left / (number * each_s + more_s))
            # The ends of the model may lie on other chunks than the first.
            fixed_s += (base_s + own_s) * number * weight + is_whole * base_s * weights
            fixed_s += before_s * weight
            weights += weight
            fixed_s += zero_s * weights
        return (self._num_layers + fixed_s) / weights

    def _hops_s(self, chunks: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds for which each stage waits for its own sends of a micro-batch, and
        those of the boundaries before it, there and back, without these waits; [unlike replica,
        stage]; for its own number of chunks up to so many."""
        there_s, back_s = self._prices.boundaries_s
        # A message there belongs to the stage before, one back to the stage behind.
        there_s, last_s, back_s = there_s[:, :-1], there_s[:, -1], back_s[:, :-1]
        waits_s, before_s = np.zeros_like(self._times)
        np.cumsum(there_s + back_s, axis=1, out=before_s[:, 1:])
        if self._sends == "waited" and chunks == 1:
            waits_s[:, :-1] = there_s
            waits_s[:, 1:] += back_s
            before_s[:, 1:] -= back_s
        # An interleaved stage waits for what its forward passes send; its backward passes go on.
        if self._sends == "overlapped":
            waits_s[:, :-1] = self._num_chunks * there_s
            # The last stage sends back to the first what all chunks but its last one make.
            waits_s[:, -1] = (self._num_chunks - 1) * last_s
        return waits_s, before_s
