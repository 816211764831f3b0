"""The plan asked for, beside the best stock plan, and why it is good."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.alternatives import simplest_beside
from megatron_hetero.planner.advise.explain import Explanation, explain_candidate
from megatron_hetero.planner.advise.simplest import USUAL_PART, simplest
from megatron_hetero.planner.answer.planned import planned
from megatron_hetero.planner.answer.searched import searched
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Progress, Scoreboard
from megatron_hetero.planner.objectives.outcome import Outcome, outcome_of
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.request import Schedules
from megatron_hetero.planner.stock.best import StockResult
from megatron_hetero.planner.stock.search import stock_beside_a_plan
from megatron_hetero.planner.stock_strategy import (
    STOCK,
    as_its_plan,
    searched_stock_plan,
    stock_plan_and_explanation,
)
from megatron_hetero.rounding import below
from megatron_hetero.schedule.estimate import has_orders, plan_cost


def explained(
    problem: Problem,
    progress: Progress | None,
    strategy: str,
    schedules: Schedules,
    prove: bool,
    simplest_within: float | None,
    plugin_gain: float | None = None,
) -> tuple[Plan, Explanation]:
    """Return the plan asked for, which may be the best stock plan, and why it is good; arguments
    are as in `api.plan_and_explain`."""
    stock_only = problem.objective.stock_only
    # Search; if nothing fits, stock Megatron's own search may still find a plan.
    try:
        board, first, best = searched(problem, progress, strategy, simplest_within)
    except InfeasiblePlanError:
        stock = searched_stock_plan(problem, strategy == STOCK) if stock_only else None
        if stock is None:
            raise
        return stock_plan_and_explanation(problem, stock, 0)
    # Stock Megatron's plan stands beside the best one.
    stock = None
    try:
        if stock_only and not board.interrupted:
            stock = searched_stock_plan(problem, strategy == STOCK)
        elif not board.interrupted:
            stock = stock_beside_a_plan(problem)
            if stock is not None and below(stock.step_time_s, best.step_time_s):
                stock = as_its_plan(problem, stock)
    except KeyboardInterrupt:
        board.interrupted = True
    # It takes the place of the best where the plug-in gains too little, or where it is asked for.
    gives_way = _gives_way(problem, stock, best, plugin_gain)
    if stock is not None and (
        gives_way or _is_chosen(stock, first, best, stock_only, simplest_within)
    ):
        plan, explanation = stock_plan_and_explanation(problem, stock, board.num_priced)
        if stock_only:
            return plan, explanation
        if gives_way and not below(first.step_time_s, stock.step_time_s):
            return plan, explanation
        faster_by = first.step_time_s / stock.step_time_s - 1
        fastest = replace(simplest_beside(problem, first, first), slower_by=faster_by, because="")
        return plan, replace(explanation, fastest=fastest, simplest_within=simplest_within)
    # Only now the bound of the plan, which takes long: no other plan comes in its place any more.
    plan = planned(problem, board, first, best, progress, schedules, prove)
    return _explained_candidate(problem, board, first, best, plan, stock, simplest_within)


def _gives_way(
    problem: Problem,
    stock: StockResult | None,
    best: Candidate,
    plugin_gain: float | None,
) -> bool:
    """Return whether the best stock plan takes the place of the plug-in's: it is slower by at most
    the part `plugin_gain`, or faster if `best` is a stock plan too. True only for a simulated step
    and a plan with the settings that the limits fix."""
    # What two short steps tell proves no plan.
    if stock is None or plugin_gain is None or not stock.is_simulated:
        return False
    as_given = problem.cluster.limits.as_given
    changed = stock.plan.workload and stock.plan.workload.training
    for setting in ("micro_batch_size", "recompute"):
        own = getattr(problem.workload.training, setting)
        if setting in as_given and getattr(changed, setting, own) != own:
            return False
    # Against a plan that stock Megatron runs too, only a faster one counts.
    allowed = 0.0 if best.is_stock else plugin_gain
    return stock.step_time_s <= (1 + allowed) * best.step_time_s and (
        not best.is_stock or below(stock.step_time_s, best.step_time_s)
    )


def _is_chosen(
    stock: StockResult, first: Candidate, best: Candidate, stock_only: bool, within: float | None
) -> bool:
    """Return whether the best plan by stock flags is the plan asked for: the fastest stock plan, or
    the simplest within a part of the first."""
    is_near = within is not None and stock.step_time_s <= (1 + within) * first.step_time_s
    is_faster = below(stock.step_time_s, best.step_time_s)
    return (stock_only and is_faster) or (is_near and (is_faster or not best.is_stock))


def _explained_candidate(
    problem: Problem,
    board: Scoreboard,
    first: Candidate,
    best: Candidate,
    plan: Plan,
    stock: StockResult | None,
    simplest_within: float | None,
) -> tuple[Plan, Explanation]:
    # Other orders are priced as a plan, because a placement does not know them.
    if has_orders(plan):
        placement = placement_of(plan, problem.cluster)
        best = replace(best, placement=placement, cost=plan_cost(plan, problem.costs, placement))
    explanation = explain_candidate(problem, board, best, plan.idle_reasons, stock)
    outcome = outcome_of(problem, board, best)
    if has_orders(plan):
        explanation = replace(explanation, hidden_hops=())  # its orders are more than counts
    if has_orders(plan) or plan.exchange_groups:
        outcome = _with_bound_of(plan, outcome)
    if simplest_within is not None:
        fastest = None if first is best else simplest_beside(problem, first, best)
        explanation = replace(explanation, fastest=fastest, simplest_within=simplest_within)
    elif not (board.interrupted or best.is_stock or has_orders(plan)):
        # A usual search also says which plan is the simplest near it.
        simple = simplest(board, first, USUAL_PART)
        is_beaten = stock is not None and _is_chosen(stock, first, simple, False, USUAL_PART)
        is_first = simple is first or is_beaten  # the row of stock Megatron stands for it
        other = None if is_first else simplest_beside(problem, simple, best)
        explanation = replace(explanation, simplest=other, simplest_within=USUAL_PART)
    return plan, replace(explanation, outcome=outcome)


def _with_bound_of(plan: Plan, outcome: Outcome) -> Outcome:
    """Keep the bound on the step, which holds for the plan's orders; bounds on other aims are of
    counts."""
    estimates = plan.estimates
    if outcome.objective != "throughput" or estimates is None:
        return replace(outcome, bound=None, gap=None, bound_relaxes="")
    return replace(
        outcome,
        bound=estimates.bound_s,
        gap=estimates.gap,
        bound_relaxes=estimates.bound_relaxes,
        bound_with_context_parallel=estimates.bound_with_context_parallel_s,
    )
