"""What no case of a form on a grid falls below, from the prices of single kinds of GPUs.

Quicker than the prices of the grid's own stages, whose links these leave out: most grids take too
long an exchange, whatever their links are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.divisions import shortest_s
from megatron_hetero.planner.stock.forms import groups_fit_grid, micro_batch_sizes
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks, grids_of
from megatron_hetero.planner.stock.least_exchange import (
    beyond_passes,
    least_exchange,
    num_hiding,
)
from megatron_hetero.planner.stock.rates import GroupForm, StockRates


@dataclass(frozen=True, eq=False)
class _Grids:
    """Grids with their stages one after the other.

    Attributes:
        grids: them.
        starts: the first stage of each grid.
        zero_s, layer_s: least exchange of gradients and weights: without layers, and what a layer
            adds, [stage].
        kinds_of_stages: index into `kinds`, [stage].
        kinds: distinct kinds of GPUs of a stage.
        sequences: of a replica in a step, [stage].
        num_hiding: micro-batches whose passes may hide the exchange, in any number of chunks,
            [stage].
        typical_layers: of a stage in the mean, [stage].
    """

    grids: tuple[StockGrid, ...]
    starts: NDArray[np.int64]
    zero_s: NDArray[np.float64]
    layer_s: NDArray[np.float64]
    kinds_of_stages: NDArray[np.int64]
    kinds: tuple[tuple[int, ...], ...]
    sequences: NDArray[np.float64]
    num_hiding: NDArray[np.int64]
    typical_layers: NDArray[np.float64]


Paces = tuple[Sequence[StockGrid], NDArray[np.float64]]
"""Grids, and the bound of each in seconds."""


class GridBounds:
    """Bounds of forms on grids, from cached prices.

    Args:
        rates: of the kinds of GPUs.
    """

    def __init__(self, problem: Problem, rates: StockRates) -> None:
        self._problem, self._rates = problem, rates
        self._least_size = min(micro_batch_sizes(problem))
        # The ranks of a search live as long as its bounds.
        self._grids: dict[tuple[int, int], tuple[StockGrid, ...]] = {}
        self._tables: dict[tuple[object, ...], _Grids] = {}

    def paces_s(self, ranks: StockRanks, form: GroupForm, num_chunks: int = 1) -> Paces:
        """Return each grid on which a form can be, with a lower bound for so many chunks a stage or
        more, as if memory had no end."""
        table = self._table(ranks, form)
        if not table.grids:
            return (), np.zeros(0)
        given = *self._lines_s(table, form), self._problem.num_layers, num_chunks
        return table.grids, shortest_s(*given, table.starts)

    def _table(self, ranks: StockRanks, form: GroupForm) -> _Grids:
        """Return the grids on which a form can be, whatever its micro-batches and recompute are."""
        groups, of_ranks = form.settings.expert_groups, (id(ranks), form.context_parallel)
        if (*of_ranks, groups) not in self._tables:
            if of_ranks not in self._grids:
                every = grids_of(self._problem, ranks, form.context_parallel)
                self._grids[of_ranks] = tuple(
                    grid for grid in every if self._batch % grid.num_replicas == 0
                )
            grids = [
                grid
                for grid in self._grids[of_ranks]
                if groups_fit_grid(grid, groups) and self._has_room(grid, form)
            ]
            self._tables[*of_ranks, groups] = self._table_of(grids, form)
        return self._tables[*of_ranks, groups]

    def _has_room(self, grid: StockGrid, form: GroupForm) -> bool:
        """Return whether the stages hold all layers with the smallest micro-batches."""
        size, holders = self._least_size, grid.state_holders
        return self._problem.num_layers <= sum(
            min(self._rates.most_layers(kind, form, size, holders) for kind in kinds)
            for kinds in grid.kinds_of_stages
        )

    def _table_of(self, grids: Sequence[StockGrid], form: GroupForm) -> _Grids:
        costs, groups = self._problem.costs, form.settings.expert_groups
        rows = costs.vocab_rows([form.width])
        lines = [line for g in grids for line in least_exchange(g, costs, rows, groups)]
        stages = [kinds for grid in grids for kinds in grid.kinds_of_stages]
        numbers: dict[tuple[int, ...], int] = {}
        kinds = [numbers.setdefault(own, len(numbers)) for own in stages]
        depths = np.array([grid.num_stages for grid in grids], dtype=np.int64)
        replicas = np.array([grid.num_replicas for grid in grids], dtype=np.int64)
        return _Grids(
            tuple(grids),
            np.concatenate([[0], np.cumsum(depths)[:-1]]).astype(np.int64),
            np.array([zero_s for zero_s, _ in lines]),
            np.array([more_s for _, more_s in lines]),
            np.array(kinds, dtype=np.int64),
            tuple(numbers),
            self._batch / np.repeat(replicas, depths),
            np.array([n for grid in grids for n in self._num_hiding(grid)], dtype=np.int64),
            self._problem.num_layers / np.repeat(depths, depths),
        )

    def _num_hiding(self, grid: StockGrid) -> tuple[int, ...]:
        depth = grid.num_stages
        most_chunks = self._problem.num_layers // depth if depth > 1 else 1
        return num_hiding(self._problem.workload.training, depth, most_chunks)

    def _lines_s(
        self, table: _Grids, form: GroupForm
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the seconds of a step without layers, and of each layer, [stage]."""
        layer_s = self._rates.layers_s(form)
        slowest_s = [max(map(layer_s, kinds)) for kinds in table.kinds]
        passes_s = np.array(slowest_s)[table.kinds_of_stages]
        number = table.sequences / form.settings.micro_batch_size
        zero_s, more_s = beyond_passes(
            (table.zero_s, table.layer_s),
            (0.0, np.minimum(table.num_hiding, number) * passes_s),
            table.typical_layers,
        )
        return zero_s, number * passes_s + more_s

    @property
    def _batch(self) -> int:
        return self._problem.workload.training.global_batch_size
