"""What no case of stock Megatron falls below, from the prices of single kinds of GPUs.

A kind's price is that of one group, however fast the links to others are: exchanges of sequences
and of experts take nothing here.  Each is worked out once, whatever the grid.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.network.experts import ExpertLinks
from megatron_hetero.hashed import value
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockRanks
from megatron_hetero.planner.stock.links import StageLinks
from megatron_hetero.planner.stock.settings import StockSettings


@value(frozen=True)
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
        self._nodes: dict[int, Node] = {}
        """A node of each kind."""
        for own in ranks:
            for unit, kind in zip(own.units, own.kinds, strict=True):
                if kind not in self._nodes:
                    self._nodes[kind] = problem.cluster.node_by_name[unit.node]
        # Names and sites of nodes do not matter for the passes of a group.
        self._likes = {
            kind: problem.likeness.node(node.name) for kind, node in self._nodes.items()
        }
        self._most_layers: dict[tuple[object, ...], int] = {}
        self._layer_s: dict[tuple[object, ...], dict[int, float]] = {}
        """By what decides the price beside the machine."""

    def pace_s(self, ranks: StockRanks, form: GroupForm) -> float:
        """Return a lower bound for every grid of these groups: the layers of all sequences, divided
        by the layers per second of all groups."""
        training = self._problem.workload.training
        # Micro-batches of all replicas together.
        num_batches = training.global_batch_size / form.settings.micro_batch_size
        # Layers a second of all groups, as if they worked without a pause.
        layer_s = self.layers_s(form)
        speed = sum([n / layer_s(kind) for kind, n in ranks.kind_counts])
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

    def most_layers(self, kind: int, form: GroupForm, size: int, holders: StateHolders) -> int:
        """Return the most layers of a stage on a kind, with a single micro-batch kept and all
        layers recomputed; negative where none fits.

        Args:
            size: of the micro-batch.
            holders: how many GPUs divide the states of the distributed optimizer.
        """
        workload, groups = self._problem.workload, form.settings.expert_groups
        key = self._likes[kind], form.width, form.context_parallel, groups, holders
        if key not in self._most_layers:
            is_divided = workload.training.use_distributed_optimizer
            costs = self._problem.costs.variant(
                micro_batch_size=size, recompute="full", holders=holders if is_divided else None
            )
            share = form.settings.share(workload.model, form.width, form.context_parallel)
            given = self._nodes[kind], form.width, False, False, 1
            memory = costs.memory(*given, costs.vocab_rows([form.width]), None, share)
            self._most_layers[key] = memory.max_layers
        return self._most_layers[key]

    def layers_s(self, form: GroupForm) -> Callable[[int], float]:
        """Return a function of a kind: the seconds of a layer on a group, forward and backward."""
        known = self._layer_s.setdefault(form.price_key, {})

        def layer_s(kind: int) -> float:
            like = self._likes[kind]
            if like not in known:
                known[like] = self._priced(self._nodes[kind], form)
            return known[like]

        return layer_s

    def _priced(self, node: Node, form: GroupForm) -> float:
        settings = form.settings
        # The dispatcher first: it has a table of variants of its own.
        costs = self._problem.costs.dispatched(settings.dispatcher).variant(
            micro_batch_size=settings.micro_batch_size, recompute=settings.least_recompute
        )
        # Links of unknown length cost nothing here: the price stays a lower bound.
        groups = settings.expert_groups
        experts = None if groups is None else ExpertLinks(*groups, 0.0, 0.0, None, None)
        links = StageLinks((), node.link, None, experts, (node,))
        share = settings.share(self._problem.workload.model, form.width, form.context_parallel)
        return links.pieces(costs, share, form.width).layer.total_s
