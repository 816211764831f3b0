"""What to add first: every addition is looked at by a bound or a price, the best few are planned.

An addition is credited with what it brings, and not with what planning again brings without it: a
plan edited by hand, of stock Megatron or for another objective may be far from the fastest.  So
the cluster as it is is planned anew first, and additions are compared with the faster plan.

A node is looked at by how far it moves the lower bound on the step time, which is what the dual
price of its GPUs says of one more GPU.  The bound leaves links out, so a faster link is looked at
by what the plan itself takes on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_hetero.bounds.step_time import step_time_bound_s
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.price import price_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import UsageError
from megatron_hetero.plan.communication.libraries import kept_to_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.additions import Addition, additions
from megatron_hetero.planner.division.counts import WORTH
from megatron_hetero.planner.evaluate.rescore import Rescorer
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.schedule.simulator.shared_paths import queued
from megatron_hetero.units import HOUR_S


@dataclass(frozen=True)
class WhatIf:
    """One addition.

    `promised_step_s`: what the first look at it says; `step_time_s`: of the plan found with it, no
    longer than without the addition; None where it promised too little to be planned.
    `gain`: the part of the step that it saves, of the step without the addition
    (`WhatToAdd.step_time_s`).  `price_per_hour` is of the new plan: of all its machines, and of its
    traffic between sites.
    """

    what: str
    promised_step_s: float
    step_time_s: float | None
    gain: float | None
    price_per_hour: float | None = None


@dataclass(frozen=True)
class WhatToAdd:
    """All additions, the largest gain first, beside the cluster without any.

    `step_time_s`: without an addition, of the plan or of the fastest plan found for the same
    cluster, whichever is faster; `is_planned_anew` says that it is not the plan's own.
    """

    step_time_s: float
    is_planned_anew: bool
    additions: tuple[WhatIf, ...]


def what_to_add(
    plan: Plan,
    cluster: Cluster,
    profile: Profile | None = None,
    *,
    num_planned: int = 4,
    say: Callable[[str], None] = lambda words: None,
) -> WhatToAdd:
    """Return additions to the cluster of a validated plan, the largest gain first.

    Args:
        num_planned: so many of the most promising are really planned.
        say: told what is being planned.
    Raises:
        UsageError: the plan carries no workload.
    """
    if plan.workload is None:
        raise UsageError("the plan carries no model, so nothing can be planned for it")
    # What the plan itself takes, under the prices of its problem.
    problem = make_problem(kept_to_plan(cluster, plan), plan.workload, profile)
    placement = placement_of(plan, problem.cluster)
    own_s = _step_s(problem.costs, placement)
    # The fastest plan without an addition, where that is not the plan itself.
    say("planning the cluster as it is")
    anew = Rescorer(search(problem)).best()
    is_planned_anew = anew is not None and anew.step_time_s < WORTH * own_s
    if anew is not None and is_planned_anew:
        placement, own_s = anew.placement, anew.step_time_s
    bound_s = step_time_bound_s(problem.costs)
    # Look at every addition by a quick promise.
    looked_at = []
    for addition in additions(problem):
        promised_s = _promised_s(problem, addition, placement, own_s, bound_s)
        looked_at.append((promised_s, addition))
    looked_at.sort(key=lambda entry: (entry[0], entry[1].what))
    # Plan with the best few; the others keep their promise alone.
    found = []
    for number, (promised_s, addition) in enumerate(looked_at):
        # Too little is promised for a search.
        if number >= num_planned or promised_s > WORTH * own_s:
            found.append(WhatIf(addition.what, promised_s, None, None))
            continue
        say(f"planning with {addition.what}")
        found.append(_planned(problem, addition, placement, own_s, promised_s))
    found.sort(key=lambda w: (w.step_time_s is None, w.step_time_s or 0, w.promised_step_s))
    return WhatToAdd(own_s, is_planned_anew, tuple(found))


def _promised_s(
    problem: Problem, addition: Addition, placement: Placement, own_s: float, bound_s: float
) -> float:
    costs = _costs(problem, addition.cluster)
    if addition.kind == "link":
        # The plan as it is, on faster links.
        return min(own_s, _step_s(costs, placement))
    # A node moves the bound, and the step is taken to move as far.
    return own_s * min(1.0, step_time_bound_s(costs) / bound_s)


def _planned(
    problem: Problem, addition: Addition, placement: Placement, own_s: float, promised_s: float
) -> WhatIf:
    """Plan it anew; where the plan as it is remains the best, that."""
    grown = make_problem(
        addition.cluster, problem.workload, problem.costs.profile, problem.make_costs
    )
    best = Rescorer(search(grown)).best()
    # The plan as it is stays possible, with its step or a shorter one.
    kept_s = min(own_s, _step_s(grown.costs, placement))
    if best is None or best.step_time_s >= kept_s:
        step_s, taken = kept_s, placement
    else:
        step_s, taken = best.step_time_s, best.placement
    price = price_of(grown.costs, taken, grown.costs.placement(taken))
    per_hour = None if price is None else price.of_step(step_s) * HOUR_S / step_s
    return WhatIf(addition.what, promised_s, step_s, 1 - step_s / own_s, per_hour)


def _step_s(costs: CostModel, placement: Placement) -> float:
    """Return the step with its queues on shared paths, as plans are compared."""
    return queued(costs, placement, costs.placement(placement)).step_time_s


def _costs(problem: Problem, cluster: Cluster) -> CostModel:
    return problem.make_costs(cluster, problem.workload, problem.costs.profile)
