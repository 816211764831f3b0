"""The candidate asked for as a plan: with its bound, and in the best order of computations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from megatron_hetero.bounds.divided import bound_with_context_parallel_s, divided_bound_s
from megatron_hetero.bounds.effort import PROOF
from megatron_hetero.bounds.estimate import estimates_of
from megatron_hetero.bounds.step_time import Prove, bound_by_work, step_time_bound, thorough_bound
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.idle import idle_reasons
from megatron_hetero.planner.advise.simplest import USUAL_PART
from megatron_hetero.planner.evaluate.candidate import NUM_NEAR, Candidate
from megatron_hetero.planner.evaluate.rescore import distinct
from megatron_hetero.planner.evaluate.scoreboard import Progress, Scoreboard
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.oracle.exact import EXACT_RELAXES
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.request import Schedules
from megatron_hetero.schedule.choice.best import best_of_orders

_NOT_TRIED = "not tried: the search was interrupted"


def planned(
    problem: Problem,
    board: Scoreboard,
    first: Candidate,
    best: Candidate,
    progress: Progress | None,
    schedules: Schedules,
    prove: bool,
    *,
    bounded: bool = True,
) -> Plan:
    """Return the candidate asked for, `best`, as a plan with its bound; where other orders of
    computations were asked for, in the best of them."""
    plan = _with_bound(problem, board, best, prove, progress, bounded=bounded)
    # After a complete enumeration the best step is its own bound.
    if board.is_exact and problem.is_by_time and plan.estimates is not None:
        proved = replace(
            plan.estimates,
            bound_s=first.step_time_s,
            gap=best.step_time_s / first.step_time_s - 1,
            bound_relaxes=EXACT_RELAXES,
            bound_with_context_parallel_s=bound_with_context_parallel_s(
                problem.costs, first.step_time_s
            ),
        )
        plan = replace(plan, estimates=proved)
    # At last, other orders of computations.
    if schedules == "best" and not board.interrupted:
        near = _near_plans(problem, board, best)
        plan = best_of_orders(plan, near, problem.cluster, problem.costs.profile)
    return plan


def _with_bound(
    problem: Problem,
    board: Scoreboard,
    best: Candidate,
    prove: bool,
    progress: Progress | None,
    *,
    bounded: bool,
) -> Plan:
    """Return the plan with its bound; interrupted, with what is known at once."""

    proved_s = 0.0
    reasons: Mapping[str, str] | None = None

    # Each proof so far is kept for the case of an interruption.
    def say(bound_s: float) -> None:
        nonlocal proved_s
        proved_s = bound_s
        if progress is not None:
            of_all_s = min(bound_s, divided_bound_s(problem.costs))
            progress(best.step_time_s, board.num_priced, of_all_s)

    # The bound takes longest; interrupted there, the plan still comes.
    try:
        if not board.interrupted:
            reasons = idle_reasons(problem, best)
            proof = partial(step_time_bound, effort=PROOF, progress=say)
            usual = thorough_bound if bounded else bound_by_work
            return plan_of(problem, best, reasons, prove=proof if prove else usual)
    except KeyboardInterrupt:
        board.interrupted = True
    # Reasons of idle devices, as far as they are known.
    if reasons is None:
        used = {device.name for device in best.placement.devices()}
        idle = {d.name: _NOT_TRIED for d in problem.cluster.devices if d.name not in used}
        reasons = idle | dict(problem.idle_reasons)
    return plan_of(problem, best, reasons, True, partial(bound_by_work, proved_s=proved_s))


def _near_plans(problem: Problem, board: Scoreboard, best: Candidate) -> Iterator[Plan]:
    """Yield nearly as fast plans of other shapes that keep the limits as well, if the objective
    compares plans by step time."""
    if problem.objective.name != "throughput":
        return
    most_s = (1 + USUAL_PART) * best.step_time_s
    for candidate in distinct(board.ranking_of_all)[:NUM_NEAR]:
        is_near = candidate.step_time_s <= most_s and candidate.standing <= best.standing
        if is_near and candidate.placement != best.placement:
            yield bare_plan(problem, candidate, idle_reasons(problem, candidate))


def plan_of(
    problem: Problem,
    best: Candidate,
    reasons: Mapping[str, str],
    interrupted: bool = False,
    prove: Prove = thorough_bound,
) -> Plan:
    """Return the validated plan of a candidate; `reasons` says why its idle devices are idle."""
    # As stock Megatron runs it only if its sends are priced so.
    is_stock = best.is_stock and problem.workload.training.stock_waits
    estimates = estimates_of(
        problem.costs, best.placement, best.cost, is_stock=is_stock, prove=prove
    )
    plan = replace(bare_plan(problem, best, reasons, interrupted), estimates=estimates)
    validate_plan(plan, problem.cluster)
    return plan
