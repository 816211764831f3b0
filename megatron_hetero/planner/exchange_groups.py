"""The exchange of gradients of a plan that was found: among all holders, or by groups of machines.

The search compares placements by the exchange that they have without groups.  At its end the best
of them are priced with the groups that the links suggest too: sites, regions of near sites, and,
where machines' uplinks differ, each machine by itself; with equal parts, and with parts by uplink.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.choices import may_choose
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.cost.sync.groups import sync_groups
from megatron_hetero.exchange.groups.regions import regions
from megatron_hetero.exchange.groups.uplinks import Uplinks, relative_uplinks
from megatron_hetero.planner.division.counts import MIN_GAIN
from megatron_hetero.planner.evaluate.candidate import NUM_NEAR, PLUGIN_GAIN, Candidate
from megatron_hetero.planner.evaluate.rescore import distinct
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.problem import Problem
from megatron_hetero.schedule.estimate import plan_cost
from megatron_hetero.schedule.simulator.shared_paths import queued

MAX_REPLICAS = 256
"""Plans of more replicas keep one exchange: every two holders have a price of their own, which of
so many would take longer than the search."""

Groups = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class ExchangeChoice:
    """The step with groups of machines, and with one exchange among all holders.

    `uplinks` are empty where machines own equal parts; `is_used` says which the plan has;
    `num_crossing` of `num_sets` sets of holders are in several groups and so exchange by them.
    """

    groups: Groups
    uplinks: Uplinks
    is_used: bool
    step_time_s: float
    other_step_time_s: float
    num_crossing: int
    num_sets: int

    @property
    def gain(self) -> float:
        """Return the part of the step that groups save; below 0 where they cost."""
        return 1 - self.step_time_s / self.other_step_time_s


def groups_of(cluster: Cluster, placement: Placement) -> Iterator[tuple[Groups, Uplinks]]:
    """Yield groups of the machines of a placement, and their uplinks: by site, by region of near
    sites, and each machine by itself, if their uplinks differ."""
    node_of = {node.name: node for node in cluster.nodes}
    sites: dict[str, dict[str, None]] = {}
    for device in placement.devices():
        node = node_of[device.node]
        sites.setdefault(node.site, {})[node.machine] = None
    by_site = tuple(tuple(machines) for machines in sites.values())
    alone = tuple((machine,) for machines in by_site for machine in machines)
    # Each machine by itself pays only where the uplinks differ.
    if len(sites) < len(alone) and (uplinks := relative_uplinks(cluster, alone)):
        yield alone, uplinks
    # With one site there is nothing between sites to spare.
    if len(sites) < 2:
        return
    yield by_site, relative_uplinks(cluster, by_site)
    near = regions(cluster, list(sites))
    if 1 < len(near) < len(sites):
        by_region = tuple(
            tuple(machine for site in region for machine in sites[site]) for region in near
        )
        yield by_region, relative_uplinks(cluster, by_region)


def with_groups(problem: Problem, board: Scoreboard, best: Candidate) -> Candidate:
    """Return the fastest of the board's best with groups of machines, if it gains enough over
    `best`; else `best`."""
    costs = problem.costs
    # A plan that came with groups keeps them.
    if best.placement.exchange_groups:
        return best
    # Groups need the plug-in: over a stock plan they must gain what the plug-in has to gain.
    wanted_s = best.step_time_s * (1 - (PLUGIN_GAIN if best.is_stock else MIN_GAIN))
    # The best may have no groups, where one further behind may, and gain more by these.
    tried = [
        candidate
        for those in ([best], distinct(board.ranking_of_all), shortest_pipelines(board))
        for candidate in islice(
            (one for one in those if _may_group(problem, one.placement)), NUM_NEAR
        )
    ]
    found = best
    for candidate in tried:
        # Even without any exchange it would not be fast enough.
        rest_s = candidate.step_time_s - candidate.cost.gradient_sync_s
        if rest_s >= min(wanted_s, found.step_time_s):
            continue
        for placement, cost in grouped(costs, candidate.placement):
            if cost.step_time_s < min(wanted_s, found.step_time_s):
                faster = board.candidate(placement, cost, candidate.strategy)
                # One that breaks a limit, costs more or takes more GPUs is no better for its speed.
                if faster.standing <= best.standing and not board.is_refused(faster):
                    found = faster
    return found


def shortest_pipelines(board: Scoreboard) -> list[Candidate]:
    """Return the candidates by their pipelines, the shortest first, which a shorter exchange may
    bring before the best; with queues on shared paths where the search has simulated these."""
    # What hardly waits may be far behind in the ranking, which knows no queues, or have left it.
    known = {one.placement: (one.cost.pipelines_s, one) for one in board.ranking_of_all}
    known |= {one.placement: (found.cost.pipelines_s, one) for found, one in board.simulated}
    by_pipelines = sorted(known.values(), key=lambda entry: (entry[0], entry[1].key))
    return distinct([one for _, one in by_pipelines])


def grouped(costs: CostModel, placement: Placement) -> Iterator[tuple[Placement, PlacementCost]]:
    """Yield the placement with each of its groups, priced with queues on shared paths; and with
    parts by uplink, where these gain enough over equal ones."""
    for groups, uplinks in groups_of(costs.cluster, placement):
        even = replace(placement, exchange_groups=groups)
        cost = priced(costs, even)
        yield even, cost
        if uplinks:
            made = replace(even, exchange_uplinks=uplinks)
            by_uplink = priced(costs, made)
            if by_uplink.step_time_s < cost.step_time_s * (1 - MIN_GAIN):
                yield made, by_uplink


def priced(costs: CostModel, placement: Placement) -> PlacementCost:
    """Price a placement with queues on shared paths."""
    return queued(costs, placement, costs.placement(placement))


def exchange_choice(problem: Problem, best: Candidate) -> ExchangeChoice | None:
    """Compare a plan's exchange with the other; None where its machines suggest no groups."""
    costs, placement = problem.costs, best.placement
    # Grouped so far: price the plan without groups, and the other way round.
    if placement.exchange_groups:
        plain = replace(placement, exchange_groups=(), exchange_uplinks=())
        plan = bare_plan(problem, replace(best, placement=plain), {})
        # Without groups stock Megatron may run it, by its own exchange.
        grouping, grouped_cost, is_used = placement, best.cost, True
        plain_cost = plan_cost(plan, costs, plain)
    else:
        if not _may_group(problem, placement):
            return None
        found = min(grouped(costs, placement), key=lambda e: e[1].step_time_s, default=None)
        if found is None:
            return None
        (grouping, grouped_cost), plain_cost, is_used = found, best.cost, False
    # Count the exchanges that cross groups.
    groups = grouping.exchange_groups
    number = {machine: i for i, group in enumerate(groups) for machine in group}
    nodes = costs.cluster.node_by_name
    rows = costs.vocab_rows(placement.widths)
    # Holders of every slice; equal sets share one exchange.
    every = {group.holders for group in sync_groups(placement, problem.workload.model, rows)}
    crossing = 0
    for holders in every:
        stages = [placement.replicas[r].stages[s] for r, s in holders]
        crossing += len({number[nodes[x.devices[0].node].machine] for x in stages}) > 1
    return ExchangeChoice(
        groups,
        grouping.exchange_uplinks,
        is_used,
        grouped_cost.step_time_s,
        plain_cost.step_time_s,
        crossing,
        len(every),
    )


def _may_group(problem: Problem, placement: Placement) -> bool:
    """Return whether groups are tried for a placement."""
    return (
        may_choose(problem.costs, "exchange")
        and problem.objective.name == "throughput"
        and not problem.objective.stock_only
        and len(placement.replicas) <= MAX_REPLICAS
        and not placement.has_sharded_layers
        and not placement.has_context_parallel
        and not placement.has_expert_groups
    )
