"""The bundles of each of several sites, and an estimate of the step of all sites together.

Pipelines stay on their sites; the gradient exchange joins them.  It lasts as long as the busiest
network card, so a node with many layers on a slow network delays all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron_hetero.planner.columns.bundle_mix import PoolBundles
from megatron_hetero.planner.columns.bundles import Bundle, Mix
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.shapes.kinds import Kind


@dataclass(frozen=True, eq=False)
class Site:
    """One site with bundles: those of its pool, and its own kinds in the same order."""

    bundles: PoolBundles
    kinds: tuple[Kind, ...]


Choice = tuple[tuple[Site, Mix], ...]
"""Pairs of a chosen site and the mix of its bundles."""


def together_s(num_micro_batches: int, counted: Mapping[Bundle, int]) -> float:
    """Return the time in which replicas would do all micro-batches, if micro-batches could be
    split."""
    per_s = sum(n / bundle.filled.period_s for bundle, n in counted.items())
    # Micro-batches that a replica loses to its fill.
    lost = sum(
        n * (bundle.filled.fill_s / bundle.filled.period_s - 1) for bundle, n in counted.items()
    )
    pipelines_s = (num_micro_batches + lost) / per_s
    return max(pipelines_s, *(bundle.filled.fill_s for bundle in counted))


class QuickStep(NamedTuple):
    """About the seconds of a step: of the pipelines, and of the exchange between replicas."""

    pipelines_s: float
    exchange_s: float

    @property
    def step_s(self) -> float:
        """Return about the seconds of the whole step."""
        return self.pipelines_s + self.exchange_s


def quick_step(problem: Problem, choice: Choice) -> QuickStep | None:
    """Return about the step's time; None where the batch or the limits do not allow so many
    replicas."""
    counted: dict[Bundle, int] = {}
    for _, mix in choice:
        for bundle, count in mix:
            counted[bundle] = counted.get(bundle, 0) + count * bundle.shape.num_replicas
    num_replicas = sum(counted.values())
    if num_replicas not in problem.replica_counts():
        return None
    pipelines_s = together_s(problem.num_micro_batches, counted)
    # One replica alone has nobody to exchange with.
    if num_replicas == next(iter(counted)).shape.num_replicas:
        return QuickStep(pipelines_s, 0.0)
    # A ring sends each gradient almost twice.
    factor = 2 * (num_replicas - 1) / num_replicas
    return QuickStep(pipelines_s, factor * exchange_s(problem, choice))


def by_exchange(tried: Sequence[Sequence[Site]], step_s: float) -> Iterator[Choice]:
    """Yield, for each limit on the cards' time, each site's mix with the most work within the
    limit; sites without such a mix idle.

    Args:
        tried: the sites with each limit on layers, in one order.
        step_s: seconds of the pipelines.
    """
    # Mixes of each distinct set of bundles: work done, seconds of the cards.
    options: dict[int, list[tuple[float, float, Mix]]] = {}
    # Sites that are alike share their bundles, and so the mixes too.
    for bundles in {id(site.bundles): site.bundles for sites in tried for site in sites}.values():
        options[id(bundles)] = [
            (
                -sum(n * bundle.micro_batches(step_s) for bundle, n in mix),
                _card_s(bundles, mix),
                mix,
            )
            for mix in bundles.mixes(step_s)
            if mix
        ]
    # For each place, the mixes of its sites by work.
    places = [
        sorted(
            (
                (work, card_s, number, site, mix)
                for number, site in enumerate(of_place)
                for work, card_s, mix in options[id(site.bundles)]
            ),
            key=_most_work,
        )
        for of_place in zip(*tried, strict=True)
    ]
    # Under each limit on the cards' time, the most work at every place.
    for limit_s in sorted({entry[1] for entries in places for entry in entries}):
        best = (next((e for e in entries if e[1] <= limit_s), None) for entries in places)
        yield tuple((site, mix) for *_, site, mix in filter(None, best))


def _most_work(entry: tuple[float, float, int, Site, Mix]) -> tuple[float, float, int]:
    work, card_s, number, *_ = entry
    return work, card_s, number


def _card_s(bundles: PoolBundles, mix: Mix) -> float:
    """Return one pass of the gradients over the busiest node's card, between the nodes of a site;
    zero for a single node."""
    if sum(count * sum(bundle.shape.num_nodes().values()) for bundle, count in mix) == 1:
        return 0.0
    return max(bundles.pass_s(bundle) for bundle, _ in mix)


def exchange_s(problem: Problem, choice: Choice) -> float:
    """Return about one pass of the gradients through a ring over all nodes: the card that has
    most to do, or the slowest way between two sites that follow each other, whose latencies add
    up.  A line that sites share carries the gradients of all layers."""
    table, cluster = choice[0][0].bundles.table, problem.cluster
    used = [(site, mix) for site, mix in choice if mix]
    card_s = max(_card_s(site.bundles, mix) for site, mix in used)
    if len(used) == 1:
        return card_s
    ring = sorted(
        (cluster.site_places[node.site], node.name, _most_layers(mix))
        # Sites in the order of the cluster's places, which a ring follows.
        for node, mix in ((site.kinds[0].node, mix) for site, mix in used)
    )
    across_s = latency_s = 0.0
    lines_s: dict[str, float] = {}
    nodes = cluster.node_by_name
    for (_, one, here), (_, other, there) in pairwise((*ring, ring[0])):
        layer_s, link = table.pair_sync_s(one, other), cluster.node_links[one, other]
        # Both neighbours exchange the layers that both hold.
        across_s = max(across_s, min(here, there) * layer_s)
        latency_s += link.latency_s
        for line in cluster.site_lines.get((nodes[one].site, nodes[other].site), ()):
            # Seconds of all layers at the line's bandwidth instead of the link's.
            all_s = problem.num_layers * layer_s * link.bytes_per_s / line.bytes_per_s
            lines_s[line.name] = lines_s.get(line.name, 0.0) + all_s
    return max(card_s, across_s, *lines_s.values()) + latency_s


def _most_layers(mix: Mix) -> int:
    """Return most layers that a node holds."""
    return max(layers for bundle, _ in mix for _, layers in bundle.node_layers)
