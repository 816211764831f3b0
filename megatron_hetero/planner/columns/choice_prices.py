"""Prices of the choices of bundles, in an order that learns how wrong estimates are."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import mean

from megatron_hetero.cost.placement import Placement
from megatron_hetero.planner.columns.bundle_shapes import bundle_chains
from megatron_hetero.planner.columns.site_mixes import Choice, QuickStep
from megatron_hetero.planner.completion.filled import Filled
from megatron_hetero.planner.completion.own_flags import OwnFlags
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.units import Chain


class ChoicePrices:
    """Prices choices, and learns how wrong their estimates are: that of the exchange, and those of
    the pipelines of equal bundles and of unlike ones, which may have to wait for each other."""

    def __init__(
        self,
        board: Scoreboard,
        own_flags: OwnFlags,
        found: Mapping[Choice, QuickStep],
        name: str,
    ) -> None:
        self.board, self.own_flags, self.found, self.name = board, own_flags, found, name
        self.work = 0
        """Stages priced."""
        self._exchange: list[float] = []
        """Of priced choices, the exchange's seconds over those estimated."""
        self._pipelines: tuple[list[float], list[float]] = ([], [])
        """The same of the pipelines: of equal bundles, and of unlike ones."""

    def score(self, choice: Choice) -> None:
        """Price a choice, if it is allowed."""
        placement = _placed(self.own_flags, choice)
        if placement is None:
            return
        candidate = self.board.score(placement, self.name)
        self.work += sum(len(replica.stages) for replica in placement.replicas)
        if candidate is None:
            return
        quick, cost = self.found[choice], candidate.cost
        self._pipelines[_is_mixed(choice)].append(cost.pipelines_s / quick.pipelines_s)
        if quick.exchange_s > 0:
            self._exchange.append(cost.gradient_sync_s / quick.exchange_s)

    def soonest(self, choices: Sequence[Choice]) -> int:
        """Return the index of the choice with the soonest step, were it estimated as wrongly as
        those that are priced."""
        exchange, *pipelines = [
            mean(shown or [1.0]) for shown in (self._exchange, *self._pipelines)
        ]
        times_s = []
        for choice in choices:
            quick = self.found[choice]
            pipelines_s = pipelines[_is_mixed(choice)] * quick.pipelines_s
            times_s.append(pipelines_s + exchange * quick.exchange_s)
        return times_s.index(min(times_s))


def _is_mixed(choice: Choice) -> bool:
    """Return whether a choice has bundles that are not alike."""
    return len({bundle.shape for _, mix in choice for bundle, _ in mix}) > 1


def in_order(found: Mapping[Choice, QuickStep]) -> tuple[list[Choice], list[Choice]]:
    """Return the soonest of each number of sites and set of GPU types, and all others, both by
    quick time; of choices that divide the nodes alike one."""
    unlike: dict[Hashable, Choice] = {}
    for choice in sorted(found, key=lambda choice: found[choice].step_s):
        unlike.setdefault(_division(choice), choice)
    soonest: dict[Hashable, Choice] = {}
    for choice in unlike.values():
        soonest.setdefault((len(choice), _gpu_types(choice)), choice)
    firsts = list(soonest.values())
    return firsts, [choice for choice in unlike.values() if choice not in firsts]


def _division(choice: Choice) -> Hashable:
    """Return equal for choices of the same bundles on the same sites."""
    return frozenset((site.kinds[0].node.name, frozenset(mix)) for site, mix in choice if mix)


def _gpu_types(choice: Choice) -> frozenset[str]:
    return frozenset(
        site.bundles.table.kinds[block.kind].node.gpu_type.name
        for site, mix in choice
        for bundle, _ in mix
        for block in bundle.shape.blocks
    )


def _placed(own_flags: OwnFlags, chosen: Choice) -> Placement | None:
    """Return bundles on nodes, and micro-batches in proportion to speed; None with more replicas
    than the batch or the limits allow."""
    chains: list[Chain] = []
    filled: list[Filled] = []
    for site, mix in chosen:
        # Own lists, because `bundle_chains` takes nodes off them.
        nodes = {
            index: list(kind.nodes)
            for index, kind in zip(site.bundles.kinds, site.kinds, strict=True)
        }
        for bundle, count in mix:
            for _ in range(count):
                made = bundle_chains(bundle.shape, nodes, own_flags.problem)
                chains += made
                filled += [bundle.filled] * len(made)
    return own_flags.placement(chains, filled)
