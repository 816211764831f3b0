"""What no case of a form on a grid falls below, from the prices of single kinds of GPUs.

Quicker than the prices of the grid's own stages, whose links these leave out: most grids take too
long an exchange, or have too little memory, whatever their links are.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.planner.stock.least_exchange import least_exchange
from megatron_hetero.planner.stock.rates import GroupForm, StockRates


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


class GridBounds:
    """Bounds of forms on grids, from cached prices.

    Args:
        rates: of the kinds of GPUs.
    """

    def __init__(self, problem: Problem, rates: StockRates) -> None:
        self._problem, self._rates = problem, rates
        self._rooms: dict[tuple[object, ...], _Room] = {}

    def pace_s(self, grid: StockGrid, form: GroupForm, num_chunks: int = 1) -> float:
        """Return a lower bound for a form on a grid, with so many chunks a stage or more, as if
        memory had no end."""
        most = [self._problem.num_layers] * grid.num_stages
        return _shortest_s(self._stages(grid, form, most), self._problem.num_layers, num_chunks)

    def fitting_s(self, grid: StockGrid, form: GroupForm, num_chunks: int = 1) -> float:
        """Return what `pace_s` does, with the layers that fit; infinite where there are too few."""
        most = self._most_layers(grid, form)
        if min(most) < num_chunks:
            return inf
        return _shortest_s(self._stages(grid, form, most), self._problem.num_layers, num_chunks)

    def _stages(
        self, grid: StockGrid, form: GroupForm, most: list[int]
    ) -> list[tuple[float, float, int]]:
        """Return of each stage the seconds without layers, those of each layer, and `most`."""
        costs, groups = self._problem.costs, form.settings.expert_groups
        exchange = least_exchange(grid, costs, costs.vocab_rows([grid.width]), groups)
        number = self._num_micro_batches(grid, form)
        found = []
        for kinds, (zero_s, more_s), own in zip(grid.kinds_of_stages, exchange, most, strict=True):
            layer_s = max(self._rates.layer_s(kind, form) for kind in kinds)
            found.append((zero_s, number * layer_s + more_s, own))
        return found

    def _num_micro_batches(self, grid: StockGrid, form: GroupForm) -> int:
        batch = self._problem.workload.training.global_batch_size
        return batch // grid.num_replicas // form.settings.micro_batch_size

    def _most_layers(self, grid: StockGrid, form: GroupForm) -> list[int]:
        """Return the most layers that each stage has room for."""
        depth, number = grid.num_stages, self._num_micro_batches(grid, form)
        rooms: dict[tuple[int, bool, bool], _Room] = {}
        found = []
        for p, kinds in enumerate(grid.kinds_of_stages):
            most = self._problem.num_layers
            for kind in kinds:
                key = kind, p == 0, p + 1 == depth
                if key not in rooms:
                    rooms[key] = self._room(*key, form, grid.state_holders)
                # 1F1B keeps as many micro-batches as there are stages from this one on; chunks
                # keep no fewer.
                most = min(most, rooms[key].most_layers(min(depth - p, number)))
            found.append(most)
        return found

    def _room(
        self, kind: int, first: bool, last: bool, form: GroupForm, holders: StateHolders
    ) -> _Room:
        """Price the memory of a GPU of a stage, with all layers recomputed that may be."""
        settings = form.settings
        again = "full" if settings.recompute == "as needed" else settings.recompute
        key = (
            *(kind, first, last, form.width, form.context_parallel, holders),
            *(settings.micro_batch_size, again, settings.expert_groups),
        )
        if key in self._rooms:
            return self._rooms[key]
        costs = self._problem.costs
        is_divided = costs.workload.training.use_distributed_optimizer
        costs = costs.variant(
            micro_batch_size=settings.micro_batch_size,
            recompute=again,
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
        self._rooms[key] = _Room(
            memory.capacity_bytes - (memory.base_bytes - base),
            memory.bytes_per_layer - each,
            base,
            each,
            most,
        )
        return self._rooms[key]


def _shortest_s(stages: list[tuple[float, float, int]], num_layers: int, least: int) -> float:
    """Return the least time in which stages take all layers, as if layers could be cut; infinite
    where they have no room.

    Args:
        stages: seconds without layers, of each layer, and the most layers.
        num_layers: of the model.
        least: layers of each stage.
    """
    if sum(most for *_, most in stages) < num_layers:
        return inf
    longest_s = max(zero_s + least * each_s for zero_s, each_s, _ in stages)
    left, open_stages = float(num_layers), stages
    while True:
        # All stages equally long: T = zero + each n for each, and the layers add up.
        slowness = sum(1 / each_s for _, each_s, _ in open_stages)
        offset = sum(zero_s / each_s for zero_s, each_s, _ in open_stages)
        step_s = (left + offset) / slowness
        # Stages without room for their part are full, and the others take the rest.
        kept = [own for own in open_stages if own[0] + own[1] * own[2] > step_s]
        if len(kept) == len(open_stages) or not kept:
            return max(step_s, longest_s)
        left -= sum(own[2] for own in open_stages) - sum(own[2] for own in kept)
        open_stages = kept
