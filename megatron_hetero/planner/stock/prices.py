"""Prices of stages of stock Megatron, the same for all cases with like stages.

Each is worked out once for like stages and like messages (`planner.stock.likes`).  Times are worked
out first, as they rank what is searched; memory only for what they leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.cost.memory.stage import StageMemory, update_traffic_bytes
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.experts import ExpertLinks
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.gradient_sums import update_time_s
from megatron_hetero.hashed import value
from megatron_hetero.model.training import TokenDispatcher
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockGrid
from megatron_hetero.planner.stock.in_flight import num_in_flight, with_times_kept
from megatron_hetero.planner.stock.likes import Likes, StockLikes
from megatron_hetero.planner.stock.links import StageLinks
from megatron_hetero.planner.stock.place import StageMemories, StockPlace
from megatron_hetero.planner.stock.settings import StockSettings
from megatron_hetero.schedule.network import crossing
from megatron_hetero.schedule.simulator.relaxed import BoundarySeconds

PieceSeconds = tuple[PassTimes, PassTimes, PassTimes]
"""Passes of a layer, of the embedding and of the head."""


class StockPrices:
    """Prices of the stages of all grids of a search.

    Args:
        problem: whose cluster and job are priced.  The kinds of groups in the grids have one number
            each throughout.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.likes = problem, StockLikes(problem)
        self._pieces: dict[tuple[object, ...], PieceSeconds] = {}
        self._memories: dict[tuple[object, ...], StageMemories] = {}
        self._crossings: dict[tuple[int, int], BoundarySeconds] = {}
        self._shares: dict[tuple[object, ...], TensorShare | None] = {}

    def of(self, grid: StockGrid, settings: StockSettings) -> GridPrices:
        """Return the prices of a grid under some settings."""
        # By blocks, stages begin without recompute and get as much as they need.
        costs = self.problem.costs
        plain = costs.dispatched(settings.dispatcher).variant(
            micro_batch_size=settings.micro_batch_size, recompute=settings.least_recompute
        )
        key = grid.width, grid.context_parallel, settings.expert_groups
        if key not in self._shares:
            model = self.problem.workload.model
            self._shares[key] = settings.share(model, grid.width, grid.context_parallel)
        # Memory is the same with both dispatchers.
        memories = costs.variant(
            micro_batch_size=settings.micro_batch_size, recompute=settings.least_recompute
        )
        return GridPrices(self, grid, settings, plain, memories, self._shares[key])

    def quickest(
        self, grid: StockGrid, settings: StockSettings, dispatchers: Sequence[TokenDispatcher]
    ) -> list[StockSettings]:
        """Return settings with each dispatcher of tokens that is the quickest on some stage; with
        the job's own where no token travels."""
        own = self.problem.workload.training.token_dispatcher
        groups = settings.expert_groups
        # Within one rank no token travels, so that the dispatcher does not matter.
        if groups is None or groups[0] == 1:
            return [replace(settings, dispatcher=own)]
        every = [replace(settings, dispatcher=dispatcher) for dispatcher in dispatchers]
        if len(every) == 1:
            return every
        found: dict[StockSettings, None] = {}
        # The exchange is all that the dispatcher changes.
        prices = [self.of(grid, one) for one in every]
        for number in prices[0].stages.numbers:
            seconds = [one.exchange_s(self.likes.links[number].experts) for one in prices]
            found[every[seconds.index(min(seconds))]] = None
        return list(found)

    def pieces(self, prices: GridPrices, links: StageLinks, costs: CostModel) -> PieceSeconds:
        """Return the passes of the model's pieces on a stage, under a price list."""
        grid = prices.grid
        key = (
            *(links, id(costs), grid.width, grid.context_parallel, prices.settings.expert_groups),
            grid.num_stages == 1,
        )
        if key not in self._pieces:
            pieces = links.pieces(costs, prices.share, grid.width)
            head = pieces.head
            if grid.num_stages == 1:
                head += PassTimes(0.0, pieces.tied_s)
            self._pieces[key] = pieces.layer, pieces.embedding, head
        return self._pieces[key]

    def memories(self, prices: GridPrices, links: StageLinks, p: int) -> StageMemories:
        """Return the memory of stages `p` with such links, and the seconds of their update."""
        grid, settings = prices.grid, prices.settings
        kept = num_in_flight(grid.num_stages, p, settings.num_chunks, prices.num_micro_batches)
        ends = p == 0, p + 1 == grid.num_stages
        key = (
            *(links.kinds, id(prices.memories), settings.recompute, settings.expert_groups),
            *(grid.width, grid.context_parallel, prices.holders, ends, kept),
        )
        if key not in self._memories:
            self._memories[key] = self._memories_of(prices, links, ends, kept)
        return self._memories[key]

    def crossing_s(self, prices: GridPrices, number: int) -> BoundarySeconds:
        """Return the seconds of a message, by its number among like ones."""
        key = number, prices.settings.micro_batch_size
        if key not in self._crossings:
            waits = self.problem.workload.training.stock_waits
            made = crossing(prices.plain, *self.likes.ends[number], waits)
            self._crossings[key] = made.serialisation_s, made.latency_s
        return self._crossings[key]

    def _memories_of(
        self,
        prices: GridPrices,
        links: StageLinks,
        ends: tuple[bool, bool],
        kept: tuple[int, float],
    ) -> StageMemories:
        width, rows = prices.grid.width, prices.rows
        plain, (first, last), (in_flight, times) = prices.memories, ends, kept
        # The smallest memory of the stage's nodes decides.
        node = min(links.nodes, key=lambda n: n.gpu_type.memory_bytes)

        def memory_of(own: CostModel) -> StageMemory:
            costs = own if prices.holders is None else own.variant(holders=prices.holders)
            return costs.memory(node, width, first, last, in_flight, rows, None, prices.share)

        # Without recompute, and with it where it is as needed.
        memory, recomputed = memory_of(plain), None
        if prices.settings.recompute == "as needed":
            recomputed = memory_of(plain.variant(recompute="full"))
        # Seconds of the update without layers, and for one layer more.
        gpu_types = {own.gpu_type.name: own.gpu_type for own in links.nodes}
        holders, training = prices.holders or plain.holders, plain.workload.training
        zero_s, one_s = (
            max(
                update_time_s(update_traffic_bytes(memory, n, holders, training), own)
                for own in gpu_types.values()
            )
            for n in (0, 1)
        )
        return StageMemories(
            (zero_s, one_s - zero_s),
            with_times_kept(memory, times, is_last=last),
            recomputed,
            with_times_kept(memory, 1 / in_flight),
            memory.base["activations"] if last else 0,
            self.problem.num_layers,
        )


@value(frozen=True, eq=False)
class GridPrices:
    """Prices of one grid under some settings."""

    prices: StockPrices
    grid: StockGrid
    settings: StockSettings
    plain: CostModel
    """The price list, of whole optimizer states."""
    memories: CostModel
    """The same without the dispatcher."""
    share: TensorShare | None
    """Contents of each GPU; None is a plain equal part."""

    @property
    def holders(self) -> StateHolders | None:
        """Devices that divide the states; None without the distributed optimizer."""
        divided = self.plain.workload.training.use_distributed_optimizer
        return self.grid.state_holders if divided else None

    @property
    def rows(self) -> int:
        """Rows of the padded vocabulary."""
        return self.plain.vocab_rows([self.grid.width])

    @property
    def whole(self) -> CostModel:
        """The price list under the division of the states."""
        return self.plain if self.holders is None else self.plain.variant(holders=self.holders)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of a replica: stock Megatron gives each the same part of the batch."""
        batch = self.plain.workload.training.global_batch_size
        return batch // self.grid.num_replicas // self.settings.micro_batch_size

    @cached_property
    def _likes(self) -> tuple[Likes, Likes, Likes]:
        return self.prices.likes.of(self.grid, self.settings.expert_groups)

    @property
    def stages(self) -> Likes:
        """The stages of the unlike replicas."""
        return self._likes[0]

    @cached_property
    def boundaries_s(self) -> list[NDArray[np.float64]]:
        """The seconds of messages from each stage to the next one, from the last one to the first,
        and of the messages back; each [unlike replica, stage]."""
        _, *messages = self._likes
        return [own.figures(lambda number: sum(self._crossing_s(number))) for own in messages]

    @property
    def crossings_s(self) -> list[NDArray[np.float64]]:
        """The same on the path and in latency, each [unlike replica, stage, 2]."""
        return [own.figures(self._crossing_s) for own in self._likes[1:]]

    def _crossing_s(self, number: int) -> BoundarySeconds:
        return self.prices.crossing_s(self, number)

    def exchange_s(self, experts: ExpertLinks | None) -> float:
        """Return the seconds of a layer's exchange of tokens with their experts in a pass."""
        if experts is None or self.share is None:
            return 0.0
        model, training = self.plain.workload.model, self.plain.workload.training
        return experts.pass_s(model, training, self.share.own_tokens(model, training))

    def pieces(self, number: int) -> PieceSeconds:
        """Return the passes of the model's pieces on a stage, by its number among like ones,
        without recompute by blocks."""
        return self.prices.pieces(self, self.prices.likes.links[number], self.plain)

    def place(self, number: int, p: int) -> StockPlace:
        """Return the times and the memory of stage `p` of such a number among like ones."""
        links = self.prices.likes.links[number]
        layer, embedding, head = self.prices.pieces(self, links, self.plain)
        base = PassTimes(0.0, 0.0)
        base = base + embedding if p == 0 else base
        base = base + head if p + 1 == self.grid.num_stages else base
        recomputed_s = 0.0
        if self.settings.recompute == "as needed":
            again = self.prices.pieces(self, links, self.plain.variant(recompute="full"))[0]
            recomputed_s = again.backward_s - layer.backward_s
        memories = self.prices.memories(self, links, p)
        return StockPlace((base, layer), recomputed_s, memories)
