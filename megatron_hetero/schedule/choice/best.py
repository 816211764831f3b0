"""The end of planning, where other orders of computations than 1F1B's may be had."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.choice.choose import candidates
from megatron_hetero.schedule.choice.ruled_out import why_no_orders
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.proof.check import check_operations

LEAST_GAIN = 0.001
"""Part of a step; for less, a plan keeps its launch counts, which are easier to read."""
_MAX_PASSES = 40_000
"""Limit in stages times micro-batches, of all plans together; the first is tried anyhow."""


def best_of_orders(
    best: Plan, others: Iterable[Plan], cluster: Cluster, profile: Profile | None = None
) -> Plan:
    """Return the plan with the shortest step among `best` and other orders of `best` or `others`.

    Orders are made for each plan's times, hops and memory (`choose.candidates`); steps are compared
    with all queues and exchanges (`estimate_plan`).

    Args:
        best: valid, with estimates.
        others: nearly as good, with a workload; they need no estimates, and are taken one by one
            as far as the limit of work allows.
    """
    if best.estimates is None:
        raise ValueError("the best plan has no estimates to compare with")
    # Some workloads allow no order but 1F1B.
    if best.workload is None or why_no_orders(best.workload):
        return best
    # An order must gain at least LEAST_GAIN to be worth a plan that stock Megatron cannot run.
    found, found_s = best, best.estimates.step_time_s * (1 - LEAST_GAIN)
    left = _MAX_PASSES
    # Each plan spends work in proportion to its passes, until the limit.
    for plan in chain([best], others):
        left -= sum(len(r.stages) * r.num_micro_batches for r in plan.replicas)
        plain, *kinds = candidates(plan, cluster, profile)
        # Compare a pipeline alone first; only a quicker pipeline is worth the whole step's
        # simulation.
        for made in kinds:
            if made.plan is None or made.slowest_s >= plain.slowest_s:
                continue
            step_s = estimate_plan(made.plan, cluster, profile, bounded=False).step_time_s
            if step_s < found_s and _ends(made.plan):
                found, found_s = made.plan, step_s
        if left <= 0:
            break
    # The bound is proved once, for the plan that is returned.
    if found is not best:
        found = replace(found, estimates=estimate_plan(found, cluster, profile))
        validate_plan(found, cluster)
    return found


def _ends(plan: Plan) -> bool:
    """Return whether all operations of a plan with a workload end under NCCL's rules."""
    if plan.workload is None:
        raise ValueError("a plan without a workload says nothing of its operations")
    try:
        check_operations(plan, plan.workload)
    except PlanFormatError:
        return False
    return True
