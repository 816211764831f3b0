"""What no case of stock Megatron falls below, from the prices of single kinds of GPUs.

A kind's price is that of one group, however fast the links to others are: exchanges of sequences
take nothing here, and those of experts no less than over the best links of the kind's nodes.  Each
is worked out once, whatever the grid.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from operator import attrgetter

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.choices import dispatchers
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.experts import ExpertLinks
from megatron_hetero.cost.share import TensorShare, even_share_or_none
from megatron_hetero.cost.work.pieces import modelled_layer, price_pieces
from megatron_hetero.hashed import value
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock.grids import StockRanks
from megatron_hetero.planner.stock.least_experts import KindLinks, least_expert_links
from megatron_hetero.planner.stock.settings import StockSettings


@value(frozen=True)
class GroupForm:
    """The properties that decide a group's prices beside the GPUs."""

    width: int
    context_parallel: int
    settings: StockSettings
    has_exchange: bool = True
    """False: as if exchanges of experts took no time."""

    @cached_property
    def price_key(self) -> tuple[object, ...]:
        """Return what is equal for forms of equal prices of a kind."""
        settings = self.settings
        return (
            *(self.width, self.context_parallel),
            *(settings.micro_batch_size, settings.least_recompute, settings.expert_groups),
            self.has_exchange,
        )


class StockRates:
    """Prices of all kinds, cached.

    Args:
        ranks: whose kinds are priced, on one node of each.
    """

    def __init__(self, problem: Problem, ranks: Sequence[StockRanks]) -> None:
        self._problem = problem
        # The most GPUs of a node in any ranks decide how many a group may find on one node.
        most: dict[int, int] = {}
        nodes: dict[int, str] = {}
        for own in ranks:
            names = map(attrgetter("node"), own.units)
            for (node, kind), number in Counter(zip(names, own.kinds, strict=True)).items():
                nodes.setdefault(kind, node)
                most[kind] = max(most.get(kind, 0), number * own.width)
        self._kinds = {
            kind: KindLinks.of(problem.cluster, problem.cluster.node_by_name[name], most[kind])
            for kind, name in nodes.items()
        }
        self._layer_s: dict[tuple[object, ...], dict[int, float]] = {}
        """By what decides the price beside the kind."""
        # Names and sites of nodes do not matter for the passes of a group.
        first: dict[int, int] = {}
        self._first_alike = {
            kind: first.setdefault(problem.likeness.node(links.node.name), kind)
            for kind, links in self._kinds.items()
        }
        """The first kind of equal machines."""
        self._dispatchers = dispatchers(problem.costs)

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
            own = replace(form, settings=settings, has_exchange=False)
            found.append(self.pace_s(ranks, own))
        return min(found)

    def layers_s(self, form: GroupForm) -> Callable[[int], float]:
        """Return a function of a kind: the seconds of a layer on a group, forward and backward."""
        known = self._layer_s.setdefault(form.price_key, {})

        def layer_s(kind: int) -> float:
            found = known.get(kind)
            if found is None:
                # Without exchanges of experts kinds of equal machines have one price.
                is_alone = form.settings.expert_groups is None or not form.has_exchange
                first = self._first_alike[kind] if is_alone else kind
                if first not in known:
                    known[first] = self._priced(first, form)
                found = known[kind] = known[first]
            return found

        return layer_s

    def _priced(self, kind: int, form: GroupForm) -> float:
        settings, links = form.settings, self._kinds[kind]
        node, model = links.node, self._problem.workload.model
        costs = self._costs(settings)
        share = settings.share(model, form.width, form.context_parallel)
        groups, even = settings.expert_groups, even_share_or_none(model, form.width)
        if share is None or (groups is None and even is None):
            rows = costs.vocab_rows([form.width])
            return costs.pieces(node, form.width, rows).layer.total_s
        # Links of unknown length cost nothing here: the price stays a lower bound.
        experts = None if groups is None else ExpertLinks(*groups, 0.0, 0.0, None, None)
        if groups is not None and form.has_exchange:
            costs, experts = self._least_exchange(links, form, groups, share)
        return _layer_s(costs, node, share, experts)

    def _costs(self, settings: StockSettings) -> CostModel:
        # The dispatcher first: it has a table of variants of its own.
        return self._problem.costs.dispatched(settings.dispatcher).variant(
            micro_batch_size=settings.micro_batch_size, recompute=settings.least_recompute
        )

    def _least_exchange(
        self,
        links: KindLinks,
        form: GroupForm,
        groups: tuple[int, int],
        share: TensorShare,
    ) -> tuple[CostModel, ExpertLinks]:
        """Return the dispatcher's price list and the links with the least exchange of experts."""
        found: list[tuple[float, int, CostModel, ExpertLinks]] = []
        for dispatcher in self._dispatchers:
            costs = self._costs(replace(form.settings, dispatcher=dispatcher))
            model, training = costs.workload.model, costs.workload.training
            for experts in least_expert_links(links, form.width, *groups):
                seconds = experts.pass_s(model, training, share.own_tokens(model, training))
                found.append((seconds, len(found), costs, experts))
        return min(found, key=lambda entry: entry[:2])[2:]


def _layer_s(
    costs: CostModel, node: Node, share: TensorShare, experts: ExpertLinks | None
) -> float:
    """Return the seconds of a layer on a group of a node, or where the model has layers of several
    kinds the mean; the host's launches are left out."""
    workload, model = costs.workload, costs.workload.model
    members = ((node.gpu_type, share),)
    # What was measured is not modelled.
    if costs.profile is not None:
        rows = costs.vocab_rows([share.width])
        given = workload, costs.profile, members, node.link, rows, None, experts
        return price_pieces(*given).layer.total_s
    kinds = model.kinds or (model,)
    total_s = 0.0
    for i, number in enumerate(model.kind_counts(0, model.num_layers) if model.kinds else (1,)):
        own = ((node.gpu_type, share.of_kind(i) if model.kinds else share),)
        links = experts if kinds[i].num_experts else None
        made = modelled_layer(replace(workload, model=kinds[i]), own, node.link, links)
        total_s += number * made.total.total_s
    return total_s / (model.num_layers if model.kinds else 1)
