"""What no case of a form on a grid falls below, from the prices of single kinds of GPUs.

Quicker than the prices of the grid's own stages, whose links these leave out: most grids take too
long an exchange, or have too little memory, whatever their links are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.divisions import shortest_s
from megatron_hetero.planner.stock.forms import groups_fit_grid
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks, grids_of
from megatron_hetero.planner.stock.least_exchange import least_exchange
from megatron_hetero.planner.stock.rates import GroupForm, StockRates
from megatron_hetero.planner.stock.settings import StockSettings


@dataclass(frozen=True)
class _Room:
    """The memory of a GPU of a stage while passes are computed, and during the update.

    Attributes:
        free_bytes: without layers and activations.
        layer_bytes: of a layer without activations.
        kept_bytes, layer_kept_bytes: of each micro-batch that is kept: without layers, and what a
            layer adds.
        most_updated: layers that the update has room for.
    """

    free_bytes: int
    layer_bytes: int
    kept_bytes: int
    layer_kept_bytes: int
    most_updated: int

    def most_layers(self, num_kept: int) -> int:
        """Return the most layers with so many micro-batches kept; negative where none fits."""
        free = self.free_bytes - num_kept * self.kept_bytes
        return min(free // (self.layer_bytes + num_kept * self.layer_kept_bytes), self.most_updated)


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
    """

    grids: tuple[StockGrid, ...]
    starts: NDArray[np.int64]
    zero_s: NDArray[np.float64]
    layer_s: NDArray[np.float64]
    kinds_of_stages: NDArray[np.int64]
    kinds: tuple[tuple[int, ...], ...]
    sequences: NDArray[np.float64]


_Place = tuple[int, bool, bool, float, float]
"""Kind of GPU, whether it is the first stage and the last, and how many GPUs hold the states of a
layer and of a tied embedding."""
Paces = tuple[Sequence[StockGrid], NDArray[np.float64]]
"""Grids, and the bound of each in seconds."""


class GridBounds:
    """Bounds of forms on grids, from cached prices.

    Args:
        rates: of the kinds of GPUs.
    """

    def __init__(self, problem: Problem, rates: StockRates) -> None:
        self._problem, self._rates = problem, rates
        self._rooms: dict[tuple[object, ...], dict[_Place, _Room]] = {}
        # The ranks of a search live as long as its bounds.
        self._grids: dict[tuple[int, int], tuple[StockGrid, ...]] = {}
        self._tables: dict[tuple[object, ...], _Grids] = {}

    def paces_s(self, ranks: StockRanks, form: GroupForm, num_chunks: int = 1) -> Paces:
        """Return each grid on which a form can be, with a lower bound for so many chunks a stage or
        more, as if memory had no end."""
        table = self._table(ranks, form)
        if not table.grids:
            return (), np.zeros(0)
        each_s = self._layers_s(table, form)
        given = table.zero_s, each_s, self._problem.num_layers, num_chunks
        return table.grids, shortest_s(*given, table.starts)

    def fitting_s(self, grid: StockGrid, form: GroupForm, num_chunks: int = 1) -> float:
        """Return the bound of `paces_s` with the layers that fit; infinite where there are too few.
        """
        most = self._most_layers(grid, form)
        if min(most) < num_chunks or sum(most) < self._problem.num_layers:
            return inf
        table = self._table_of([grid], form)
        each_s = self._layers_s(table, form)
        longest_s = float((table.zero_s + num_chunks * each_s).max())
        given = table.zero_s, each_s, np.array(most), self._problem.num_layers
        return max(longest_s, _with_room_s(*given))

    def _table(self, ranks: StockRanks, form: GroupForm) -> _Grids:
        """Return the grids on which a form can be, whatever its micro-batches are."""
        groups, of_ranks = form.settings.expert_groups, (id(ranks), form.context_parallel)
        if (*of_ranks, groups) not in self._tables:
            if of_ranks not in self._grids:
                every = grids_of(self._problem, ranks, form.context_parallel)
                self._grids[of_ranks] = tuple(
                    grid for grid in every if self._batch % grid.num_replicas == 0
                )
            grids = [grid for grid in self._grids[of_ranks] if groups_fit_grid(grid, groups)]
            self._tables[*of_ranks, groups] = self._table_of(grids, form)
        return self._tables[*of_ranks, groups]

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
        )

    def _layers_s(self, table: _Grids, form: GroupForm) -> NDArray[np.float64]:
        """Return the seconds that each layer of a stage takes in a step, [stage]."""
        layer_s = self._rates.layers_s(form)
        slowest_s = [max(map(layer_s, kinds)) for kinds in table.kinds]
        passes_s = np.array(slowest_s)[table.kinds_of_stages]
        number = table.sequences / form.settings.micro_batch_size
        return np.asarray(number * passes_s + table.layer_s)

    @property
    def _batch(self) -> int:
        return self._problem.workload.training.global_batch_size

    def _num_micro_batches(self, grid: StockGrid, form: GroupForm) -> int:
        return self._batch // grid.num_replicas // form.settings.micro_batch_size

    def _most_layers(self, grid: StockGrid, form: GroupForm) -> list[int]:
        """Return the most layers that each stage has room for."""
        depth, number = grid.num_stages, self._num_micro_batches(grid, form)
        holders, rooms = grid.state_holders, self._rooms_of(form)
        found = []
        for p, kinds in enumerate(grid.kinds_of_stages):
            most = self._problem.num_layers
            for kind in {self._rates.first_alike[kind] for kind in kinds}:
                place = kind, p == 0, p + 1 == depth
                key = *place, holders.layers, holders.tied_embedding
                if key not in rooms:
                    rooms[key] = self._room(*place, form, holders)
                # 1F1B keeps as many micro-batches as there are stages from this one on; chunks
                # keep no fewer.
                most = min(most, rooms[key].most_layers(min(depth - p, number)))
            found.append(most)
        return found

    def _rooms_of(self, form: GroupForm) -> dict[_Place, _Room]:
        """Return what is known of the memory of forms that keep as much."""
        settings = form.settings
        return self._rooms.setdefault(
            (
                *(form.width, form.context_parallel, settings.micro_batch_size),
                *(_least_kept(settings), settings.expert_groups),
            ),
            {},
        )

    def _room(
        self, kind: int, first: bool, last: bool, form: GroupForm, holders: StateHolders
    ) -> _Room:
        """Price the memory of a GPU of a stage, with all layers recomputed that may be."""
        settings, costs = form.settings, self._problem.costs
        is_divided = costs.workload.training.use_distributed_optimizer
        costs = costs.variant(
            micro_batch_size=settings.micro_batch_size,
            recompute=_least_kept(settings),
            holders=holders if is_divided else None,
        )
        share = settings.share(costs.workload.model, form.width, form.context_parallel)
        rows = costs.vocab_rows([form.width])
        node = self._rates.node_of(kind)
        memory = costs.memory(node, form.width, first, last, 1, rows, None, share)
        base, each = memory.base["activations"], memory.per_layer["activations"]
        most = self._problem.num_layers
        if memory.has_copies:
            update, layer_update = memory.updating_line
            most = min(most, (memory.capacity_bytes - update) // layer_update)
        return _Room(
            memory.capacity_bytes - (memory.base_bytes - base),
            memory.bytes_per_layer - each,
            base,
            each,
            most,
        )


def _least_kept(settings: StockSettings) -> Recompute:
    """Return the recompute with which stages keep least."""
    return "full" if settings.recompute == "as needed" else settings.recompute


def _with_room_s(
    zero_s: NDArray[np.float64],
    each_s: NDArray[np.float64],
    most: NDArray[np.int64],
    num_layers: int,
) -> float:
    """Return the least time in which the stages of a grid take all layers, no more than have room
    on each.

    Args:
        zero_s, each_s: seconds without layers, and of each layer, [stage].
        most: layers that have room, [stage].
        num_layers: of the model.
    """
    is_open = np.full(len(most), True)
    while True:
        # The open stages are equally long; those without room for their part are full.
        slowness = float((1 / each_s[is_open]).sum())
        offset = float((zero_s[is_open] / each_s[is_open]).sum())
        step_s = (num_layers - int(most[~is_open].sum()) + offset) / slowness
        still = is_open & (zero_s + each_s * most > step_s)
        if still.sum() == is_open.sum() or not still.any():
            return step_s
        is_open = still
