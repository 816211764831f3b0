"""Prices of stages of stock Megatron, the same for all cases with like stages.

Stages are alike whose GPUs are of like kinds and lie on nodes in the same way, together with those
among whom experts are dealt out: a search has far fewer kinds of stages than stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron_hetero.cost.memory.stage import StageMemory, updated_bytes
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedExperts, PlacedStage
from megatron_hetero.cost.work.compute import update_time_s
from megatron_hetero.cost.work.pieces import PieceTimes
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.planner.stock.in_flight import num_in_flight, with_times_kept
from megatron_hetero.planner.stock.place import StockPlace
from megatron_hetero.planner.stock.settings import StockSettings
from megatron_hetero.schedule.network import crossing
from megatron_hetero.schedule.simulator.relaxed import BoundarySeconds


class StockPrices:
    """Prices of the stages of all grids of a search.

    Args:
        problem: whose cluster and job are priced.  The kinds of groups in the grids have one number
            each throughout.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._pieces: dict[tuple[object, ...], PieceTimes] = {}
        self._places: dict[tuple[object, ...], StockPlace] = {}
        self._crossings: dict[tuple[object, ...], BoundarySeconds] = {}

    def of(self, grid: StockGrid, settings: StockSettings) -> GridPrices:
        """Return the prices of a grid under some settings."""
        # By blocks, stages begin without recompute and get as much as they need.
        costs = self._problem.costs
        plain = costs.dispatched(settings.dispatcher).variant(
            micro_batch_size=settings.micro_batch_size, recompute=settings.least_recompute
        )
        holders = None
        if self._problem.workload.training.use_distributed_optimizer:
            holders = grid.state_holders
        rows = costs.vocab_rows([grid.width])
        return GridPrices(self, grid, settings, plain, holders, rows)

    def place(self, prices: GridPrices, d: int, p: int) -> StockPlace:
        """Return the times and the memory of a stage of a replica."""
        grid, settings, costs = prices.grid, prices.settings, prices.plain
        kept = num_in_flight(grid.num_stages, p, settings.num_chunks, prices.num_micro_batches)
        ends = p == 0, p + 1 == grid.num_stages
        pattern = prices.pattern(d, p)
        key = (pattern, id(costs), settings.recompute, settings.expert_groups, prices.holders)
        if (own := (*key, *ends, *kept)) not in self._places:
            self._places[own] = self._priced(prices, (d, p), pattern, ends, kept)
        return self._places[own]

    def crossing_s(self, prices: GridPrices, d: int, p: int, to: int) -> BoundarySeconds:
        """Return the seconds of a message from a stage to another of the same replica."""
        key = prices.links_pattern(d, p, to), id(prices.plain)
        if key not in self._crossings:
            waits = self._problem.workload.training.stock_waits
            sender, receiver = (prices.grid.stage(d, place).stage for place in (p, to))
            made = crossing(prices.plain, sender, receiver, waits)
            self._crossings[key] = made.serialisation_s, made.latency_s
        return self._crossings[key]

    def _priced(
        self,
        prices: GridPrices,
        at: tuple[int, int],
        pattern: tuple[object, ...],
        ends: tuple[bool, bool],
        kept: tuple[int, float],
    ) -> StockPlace:
        width, rows = prices.grid.width, prices.rows
        plain, (first, last), (in_flight, times) = prices.plain, ends, kept
        # The smallest memory of the stage's nodes decides.
        names = {device.node for device in prices.grid.stage(*at).devices}
        nodes = [self._problem.cluster.node_by_name[name] for name in sorted(names)]
        node = min(nodes, key=lambda n: n.gpu_type.memory_bytes)
        grid, model = prices.grid, self._problem.workload.model
        share = prices.settings.share(model, width, grid.context_parallel)

        # Pieces and memory under some recompute.
        def priced(own: CostModel) -> tuple[PieceTimes, StageMemory]:
            costs = own if prices.holders is None else own.variant(holders=prices.holders)
            memory = costs.memory(node, width, first, last, in_flight, rows, None, share)
            key = pattern, id(own), prices.settings.expert_groups
            if key not in self._pieces:
                self._pieces[key] = own.stage_pieces(prices.stage(*at), rows)
            return self._pieces[key], memory

        # Without recompute, and with it where it is as needed.
        pieces, memory = priced(plain)
        each = pieces.layer
        recomputed, recomputed_s = None, 0.0
        if prices.settings.recompute == "as needed":
            again, recomputed = priced(plain.variant(recompute="full"))
            recomputed_s = again.layer.backward_s - each.backward_s
        # Seconds of the update without layers, and for one layer more.
        gpu_types = {node.gpu_type.name: node.gpu_type for node in nodes}
        holders = prices.holders or plain.holders
        zero_s, one_s = (
            max(
                update_time_s(updated_bytes(memory, n, holders), own) for own in gpu_types.values()
            )
            for n in (0, 1)
        )
        return StockPlace(
            (pieces.stage(0, first, last), each),
            recomputed_s,
            (zero_s, one_s - zero_s),
            with_times_kept(memory, times),
            recomputed,
            with_times_kept(memory, 1 / in_flight),
            self._problem.num_layers,
        )


@dataclass(frozen=True, eq=False)
class GridPrices:
    """Prices of one grid under some settings."""

    prices: StockPrices
    grid: StockGrid
    settings: StockSettings
    plain: CostModel
    """The price list, of whole optimizer states."""
    holders: StateHolders | None
    """Devices that divide the states; None without the distributed optimizer."""
    rows: int
    """Rows of the padded vocabulary."""

    @property
    def whole(self) -> CostModel:
        """The price list under the division of the states."""
        return self.plain if self.holders is None else self.plain.variant(holders=self.holders)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a replica: stock Megatron gives each the same part of the batch."""
        batch = self.plain.workload.training.global_batch_size
        return batch // self.grid.num_replicas // self.settings.micro_batch_size

    @property
    def together(self) -> int:
        """Replicas among which experts are dealt out."""
        groups = self.settings.expert_groups
        if groups is None:
            return 1
        return max(1, groups[0] * groups[1] // self.grid.ranks_of_stage)

    def distinct_replicas(self) -> tuple[int, ...]:
        """Return the first replica of each pattern, where a pattern includes the replicas that
        share experts: replicas on like nodes have like prices."""
        return self.grid.distinct_replicas(self.together)

    def pattern(self, d: int, p: int) -> tuple[object, ...]:
        """Return what is equal for like stages."""
        peers = self._peers(d) if self.together > 1 else ()
        return self._pattern([d, *peers], [p])

    def links_pattern(self, d: int, p: int, to: int) -> tuple[object, ...]:
        """Return what is equal for two stages with like links between them."""
        return self._pattern([d], [p, to])

    def _pattern(self, replicas: Sequence[int], stages: Sequence[int]) -> tuple[object, ...]:
        grid = self.grid
        found = grid.pattern(replicas, stages)
        # With several network cards in a machine the GPUs themselves tell the links.
        if self.plain.cluster.has_nics:
            found = tuple(d for r in replicas for p in stages for d in grid.stage(r, p).devices)
        return (*found, grid.width, grid.context_parallel)

    def stage(self, d: int, p: int) -> PlacedStage:
        """Return a stage with a layer, for pricing."""
        groups, own = self.settings.expert_groups, self.grid.stage(d, p).stage
        if groups is None:
            return own
        # Experts lie on the stages of all replicas of the block.
        units = [self.grid.stage(r, p) for r in self._peers(d)]
        devices = [device for unit in units for device in unit.devices]
        return replace(own, experts=PlacedExperts(groups, tuple(devices)))

    def places(self, d: int) -> Sequence[StockPlace]:
        """Return all stages of a replica."""
        return [self.prices.place(self, d, p) for p in range(self.grid.num_stages)]

    def crossing_s(self, d: int, p: int, to: int) -> BoundarySeconds:
        """Return the seconds of a message from stage `p` to another of replica `d`."""
        return self.prices.crossing_s(self, d, p, to)

    def _peers(self, d: int) -> range:
        """Return the replicas that share experts with replica `d`: they come in blocks."""
        first = d // self.together * self.together
        return range(first, first + self.together)
