"""A lower bound on what an objective makes small: money for a step, GPUs, or the step time that
money allows.

Every plan runs on some selection of the machines (`pools`), which bounds it: by its work, and more
tightly by `bounds.step_time` for that selection alone.  The least bound of all selections holds for
all plans; selections are bounded tightly from the least on, until one that is bounded tightly is
least.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, isinf

from megatron_hetero.bounds.divided import divided_bound_s
from megatron_hetero.bounds.space import has_every_plan
from megatron_hetero.bounds.step_time import step_time_bound
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.planner.objective import Standing
from megatron_hetero.planner.objectives.node_pools import (
    MAX_SELECTIONS,
    NodePool,
    Promise,
    Selection,
    all_selections,
    node_pools,
    promise,
    restricted,
    work_of,
)
from megatron_hetero.planner.problem import Problem
from megatron_hetero.rounding import ROUNDING
from megatron_hetero.units import HOUR_S

_MAX_WORK = 1_000
"""GPUs of all selections bounded tightly."""

WORK_RELAXES = (
    "machines in fractions; memory, whole layers and micro-batches, pipeline fill, stage "
    "boundaries, gradient exchange, update"
)


@dataclass(frozen=True)
class ObjectiveBound:
    """No plan that keeps the limits has less; in money for a step, GPUs, or seconds of a step.

    `relaxes` says what it leaves out.
    """

    value: float
    relaxes: str


def objective_bound(problem: Problem) -> ObjectiveBound | None:
    """Return the bound of the problem's objective, infinite where no plan keeps the limits; None
    where the step time's own bound is all there is, or where none holds for all plans."""
    if not problem.objective.may_want_fewer(problem.cluster) or not has_every_plan(problem.costs):
        return None
    pools = node_pools(problem)
    selections = all_selections(pools, MAX_SELECTIONS)
    if selections is None:
        return _by_work(problem, pools)
    tight = _may_be_tight(problem, pools)
    # (bound, selection, what the tight bound leaves out; empty before it is bounded tightly).
    heap: list[tuple[float, Selection, str]] = []
    for selection in selections:
        value = _value(problem, promise(problem, pools, selection))
        if value is not None:
            heapq.heappush(heap, (value, selection, ""))
    work = 0
    while heap:
        value, selection, relaxes = heap[0]
        # The least of all is tight, or there is no more to be done: it holds for all plans.
        if relaxes or not tight or work >= _MAX_WORK:
            return ObjectiveBound(value, relaxes or WORK_RELAXES)
        work += sum(selection)
        heapq.heappop(heap)
        promised = promise(problem, pools, selection)
        bound = step_time_bound(_costs(problem, pools, selection), uneven=True)
        step_s = max(promised.step_s, bound.step_time_s)
        tighter = _value(problem, replace(promised, step_s=step_s))
        if tighter is not None:
            heapq.heappush(heap, (tighter, selection, bound.relaxes))
    # Each selection breaks a limit: no plan keeps them all.
    return ObjectiveBound(inf, "")


def none_keeps_the_limits(problem: Problem) -> bool:
    """Return whether there is a proof: no plan keeps the limits of time and money; for context
    parallelism only the time is bounded."""
    objective, cluster, costs = problem.objective, problem.cluster, problem.costs
    least_s = divided_bound_s(costs)
    bound = objective_bound(problem)
    if bound is None:
        if objective.may_want_fewer(cluster) or not has_every_plan(costs):
            return False
        least_s = min(least_s, step_time_bound(costs, uneven=True).step_time_s)
    elif not isinf(bound.value):
        return False
    # Of plans with context parallelism only the time is bounded, hence no price.
    standing = objective.standing_of(cluster, problem.num_gpus, least_s, None)
    return isinf(least_s) or standing.excess > ROUNDING


def _value(problem: Problem, promised: Promise) -> float | None:
    """Return what the objective makes small, of a selection used whole; None if it breaks a
    limit."""
    standing: Standing = problem.objective.standing_of(
        problem.cluster, promised.num_gpus, promised.step_s, promised.price
    )
    if standing.excess > ROUNDING:
        return None
    return promised.step_s if problem.objective.name == "throughput" else standing.value


def _by_work(problem: Problem, pools: Sequence[NodePool]) -> ObjectiveBound | None:
    """Bound too many selections: by the cheapest work, or the fewest of the fastest GPUs."""
    work = work_of(problem)
    objective = problem.objective
    if objective.name == "cheapest":
        prices = [
            price * o.layer_gpu_s / o.num_gpus
            for o in pools
            if (price := o.price_per_hour(o.num_gpus)) is not None
        ]
        return ObjectiveBound(work * min(prices) / HOUR_S, WORK_RELAXES)
    if objective.name == "fewest-gpus" and objective.max_step_s is not None:
        # Fewest GPUs: the fastest first, until they do all work in a step.
        missing, num_gpus = work / objective.max_step_s, 0
        for pool in sorted(pools, key=lambda o: o.layer_gpu_s):
            needed = ceil(missing * pool.layer_gpu_s * (1 - ROUNDING))
            taken = min(max(needed, 0), pool.most)
            num_gpus += taken
            missing -= taken / pool.layer_gpu_s
        return ObjectiveBound(float(max(num_gpus, 1)), WORK_RELAXES)
    return None


def _may_be_tight(problem: Problem, pools: Sequence[NodePool]) -> bool:
    """Return whether selections may be bounded separately: the machines of a pool also have equal
    links, so that the first machines stand for any."""
    links: dict[tuple[int, int], set[Link]] = {}
    index = {node.name: k for k, pool in enumerate(pools) for node in pool.nodes}
    for (a, b), link in problem.cluster.node_links.items():
        if a in index and b in index:
            links.setdefault((index[a], index[b]), set()).add(link)
    return all(len(found) == 1 for found in links.values())


def _costs(problem: Problem, pools: Sequence[NodePool], selection: Selection) -> CostModel:
    """Return the price list of a cluster of these machines alone."""
    part = restricted(problem, pools, selection)
    cluster: Cluster = problem.cluster
    idle = tuple(
        device.name
        for node in part.nodes
        for device in node.devices
        if device.index not in part.gpus[node.name]
    )
    limits = replace(cluster.limits, idle_devices=idle)
    names = {node.name for node in part.nodes}
    links = {pair: link for pair, link in cluster.node_links.items() if names.issuperset(pair)}
    smaller = replace(cluster, nodes=part.nodes, node_links=links, limits=limits)
    return problem.make_costs(smaller, problem.workload, problem.costs.profile)
