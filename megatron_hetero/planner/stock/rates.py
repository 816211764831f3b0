"""What no case of stock Megatron falls below, from the prices of single kinds of GPUs.

A kind's price is that of one group, however fast the links to others are: exchanges of sequences
and of experts take nothing here.  Each is worked out once, whatever the grid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hetero.cluster.spec import Node
from megatron_hetero.cost.network.experts import ExpertLinks
from megatron_hetero.cost.placement import Recompute
from megatron_hetero.cost.share import TensorShare, even_share_or_none
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.pieces import price_pieces
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockGrid, StockRanks
from megatron_hetero.planner.stock.in_flight import num_in_flight, with_times_kept
from megatron_hetero.planner.stock.settings import StockSettings


@dataclass(frozen=True)
class GroupForm:
    """The properties that decide a group's prices beside the GPUs."""

    width: int
    context_parallel: int
    settings: StockSettings

    @cached_property
    def price_key(self) -> tuple[object, ...]:
        """Return what is equal for forms of equal prices of a kind."""
        settings = self.settings
        return (
            *(self.width, self.context_parallel),
            *(settings.micro_batch_size, settings.least_recompute, settings.expert_groups),
        )


class StockRates:
    """Prices of all kinds, cached.

    Args:
        ranks: whose kinds are priced, on one node of each.
    """

    def __init__(self, problem: Problem, ranks: Sequence[StockRanks]) -> None:
        self._problem = problem
        node_of = problem.cluster.node_by_name
        self._nodes: dict[int, Node] = {
            kind: node_of[unit.node]
            for own in ranks
            for unit, kind in zip(own.units, own.kinds, strict=True)
        }
        self._times: dict[tuple[object, ...], tuple[PassTimes, PassTimes, PassTimes]] = {}
        self._rows: dict[int, int] = {}

    def pace_s(self, ranks: StockRanks, form: GroupForm) -> float:
        """Return a lower bound for every grid of these groups: the layers of all sequences, divided
        by the layers per second of all groups."""
        training = self._problem.workload.training
        # Micro-batches of all replicas together.
        num_batches = training.global_batch_size / form.settings.micro_batch_size
        counts = ranks.kind_counts.items()
        # Layers a second of all groups, as if they worked without a pause.
        speed = sum(n / self._of(kind, form)[0].total_s for kind, n in counts)
        return num_batches * self._problem.num_layers * form.context_parallel / speed

    def dealt_pace_s(self, ranks: StockRanks, form: GroupForm) -> float:
        """Return what `pace_s` does not fall below for any way to deal experts out: each expert
        whole, and on all of its tokens."""
        model = self._problem.workload.model
        found = [self.pace_s(ranks, form)]
        if model.num_experts:
            settings = replace(form.settings, expert_groups=(model.num_experts, 1))
            found.append(self.pace_s(ranks, replace(form, settings=settings)))
        return min(found)

    def least_s(self, grid: StockGrid, form: GroupForm) -> float:
        """Return what no division of the layers falls below on a grid; infinite where none fits.

        Stage i works m times t_i, after a forward has come through the stages before it and before
        a backward goes back through them: T >= m t_i + sum of t_j over j < i, of the first chunks
        alone.  A weighted mean of these holds too; the weights (not negative) make a layer count
        for at least one wherever it lies.
        """
        settings, num_layers = form.settings, self._problem.num_layers
        sequences = self._problem.workload.training.global_batch_size // grid.num_replicas
        number = sequences // settings.micro_batch_size
        weights = fixed_s = 0.0
        last = grid.num_stages - 1
        speed = offset = longest_s = 0.0
        # Stages from the last one: fastest prices of the kinds that may stand there.
        for p in reversed(range(grid.num_stages)):
            times = [self._of(kind, form) for kind in grid.stage_kinds[p]]
            each_s = max(layer.total_s for layer, _, _ in times)
            least_s = min(layer.total_s for layer, _, _ in times)
            base_s = least_base_s = 0.0
            if p == 0:
                base_s = min(first.total_s for _, first, _ in times)
            if p == last:
                base_s += min(head.total_s for _, _, head in times)
            if settings.num_chunks == 1:
                least_base_s = base_s
            # All stages together, and the longest without layers of its own.
            speed += 1 / each_s
            offset += base_s / each_s
            longest_s = max(longest_s, base_s + settings.num_chunks * each_s)
            least_s /= settings.num_chunks
            # The weight with which a layer on this stage counts for one at least.
            weight = max(0.0, (1 - least_s * weights) / (number * each_s))
            fixed_s += number * weight * base_s + weights * least_base_s
            weights += weight
        pace_s = number * max((num_layers + offset) / speed, longest_s)
        return max(pace_s, (num_layers + fixed_s) / weights)

    def fits(self, grid: StockGrid, form: GroupForm) -> bool:
        """Return whether some division of the layers may fit: by stages that hold as many as each
        can, with all of them recomputed where that is allowed."""
        problem, settings = self._problem, form.settings
        recompute: Recompute = "full" if settings.recompute == "as needed" else settings.recompute
        costs = problem.costs.variant(
            micro_batch_size=settings.micro_batch_size, recompute=recompute
        )
        if problem.workload.training.use_distributed_optimizer:
            costs = costs.variant(holders=grid.state_holders)
        share, rows = self._share(form), self._vocab_rows(form.width)
        # The same number of sequences in every replica.
        sequences = problem.workload.training.global_batch_size // grid.num_replicas
        number = sequences // settings.micro_batch_size
        total = 0
        for p, kinds in enumerate(grid.stage_kinds):
            first, last = p == 0, p + 1 == grid.num_stages
            kept, times = num_in_flight(grid.num_stages, p, settings.num_chunks, number)
            asked = form.width, first, last, kept, rows, None, share
            most = min(
                with_times_kept(costs.memory(self._nodes[kind], *asked), times).max_layers
                for kind in kinds
            )
            # A chunk has one layer at least.
            if most < settings.num_chunks:
                return False
            total += most
        return total >= problem.num_layers

    def _share(self, form: GroupForm) -> TensorShare | None:
        model = self._problem.workload.model
        return form.settings.share(model, form.width, form.context_parallel)

    def _vocab_rows(self, width: int) -> int:
        if width not in self._rows:
            self._rows[width] = self._problem.costs.vocab_rows([width])
        return self._rows[width]

    def _of(self, kind: int, form: GroupForm) -> tuple[PassTimes, PassTimes, PassTimes]:
        """Return the times of a layer, the embedding and the head."""
        key = kind, *form.price_key
        if key not in self._times:
            self._times[key] = self._priced(kind, form)
        return self._times[key]

    def _priced(self, kind: int, form: GroupForm) -> tuple[PassTimes, PassTimes, PassTimes]:
        settings, node = form.settings, self._nodes[kind]
        costs = self._problem.costs.dispatched(settings.dispatcher).variant(
            micro_batch_size=settings.micro_batch_size, recompute=settings.least_recompute
        )
        rows, share, groups = (
            self._vocab_rows(form.width),
            self._share(form),
            settings.expert_groups,
        )
        even = even_share_or_none(self._problem.workload.model, form.width)
        if share is None or (groups is None and even is None):
            pieces = costs.pieces(node, form.width, rows)
        else:
            # Links of unknown length cost nothing here: the price stays a lower bound.
            links = None if groups is None else ExpertLinks(*groups, 0.0, 0.0, None, None)
            pieces = price_pieces(
                costs.workload,
                costs.profile,
                ((node.gpu_type, share),),
                node.link,
                rows,
                None,
                links,
            )
        return pieces.layer, pieces.embedding, pieces.head
