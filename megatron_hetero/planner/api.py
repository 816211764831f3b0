"""From a cluster and a workload to a plan: run the strategies, keep the best, write it down."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from megatron_hetero.bounds.divided import bound_with_context_parallel_s, divided_bound_s
from megatron_hetero.bounds.effort import PROOF
from megatron_hetero.bounds.estimate import estimates_of
from megatron_hetero.bounds.step_time import Prove, bound_by_work, step_time_bound, thorough_bound
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.collector import no_collector
from megatron_hetero.cost.model import CostModel, MakeCosts
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.alternatives import simplest_beside
from megatron_hetero.planner.advise.explain import Explanation, explain_candidate
from megatron_hetero.planner.advise.idle import idle_reasons
from megatron_hetero.planner.advise.simplest import USUAL_PART, simplest
from megatron_hetero.planner.evaluate.candidate import NUM_NEAR, Candidate
from megatron_hetero.planner.evaluate.hanging import hanging
from megatron_hetero.planner.evaluate.rescore import Rescorer, distinct
from megatron_hetero.planner.evaluate.scoreboard import Progress, Scoreboard
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.exchange_groups import with_groups
from megatron_hetero.planner.found import best_or_error, stock_or_error
from megatron_hetero.planner.objective import THROUGHPUT, Objective
from megatron_hetero.planner.objectives.outcome import Outcome, outcome_of
from megatron_hetero.planner.oracle.exact import EXACT_RELAXES
from megatron_hetero.planner.portfolio import search, strategies_of
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.request import Schedules, checked
from megatron_hetero.planner.restrictions.one_library import for_each_library
from megatron_hetero.planner.stock.best import StockResult
from megatron_hetero.planner.stock.search import stock_beside_a_plan
from megatron_hetero.planner.stock_strategy import (
    STOCK,
    as_its_plan,
    searched_stock_plan,
    stock_plan_and_explanation,
)
from megatron_hetero.rounding import below
from megatron_hetero.schedule.choice.best import best_of_orders
from megatron_hetero.schedule.estimate import has_orders, plan_cost

_NOT_TRIED = "not tried: the search was interrupted"
_MAX_REFUSED = 32
"""Plans after which the search gives up, if none of them can run."""


@no_collector()
@for_each_library
def plan_cluster(
    cluster: Cluster,
    workload: Workload,
    *,
    profile: Profile | None = None,
    progress: Progress | None = None,
    make_costs: MakeCosts = CostModel,
    strategy: str = "auto",
    objective: Objective = THROUGHPUT,
    schedules: Schedules = "counts",
    prove: bool = False,
    simplest_within: float | None = None,
    bounded: bool = True,
) -> Plan:
    """Return the best plan found for training `workload` on `cluster`; it fits and is validated.

    Equal inputs give equal plans, whatever the order of nodes in the file.

    Args:
        progress: called with each better plan; see `scoreboard.Progress`.
        make_costs: prices that take the place of the project's own cost model.
        strategy: a name of `portfolio.STRATEGIES`, or "stock": `objective.stock_only`, with a
            search of minutes where there are many GPUs.  The plan may have another micro-batch size
            and recompute than the job.
        objective: what the plan is the best by, its limits of time and money, and whether it must
            be one that stock Megatron runs.
        schedules: "counts" for 1F1B with launch counts, "best" for other orders of computations
            where they make the step shorter (`schedule.choice.best`).
        prove: the lower bound as far as a minute or more takes it, in clusters of any size.
            Interrupted there, the plan comes with what is proved so far.
        simplest_within: not the best plan, but the one nearest to stock Megatron that is at most
            this part behind it (`advise.simplest`).
        bounded: False leaves the lower bound at that by work alone, which is known at once.
    Raises:
        InfeasiblePlanError: nothing fits; names the shortage and a relaxation that was tried.  Or
            what fits is too slow or too dear; names the nearest.
        UnsupportedError, UsageError: the job itself cannot be planned.
        LibraryError: on none of the GPUs anything trains.
        KeyboardInterrupt: interrupted before any plan was found.
    """
    problem = checked(
        make_problem(cluster, workload, profile, make_costs, objective),
        schedules, strategy, prove, simplest_within,
    )  # fmt: skip
    if problem.objective.stock_only or simplest_within is not None:
        return _explained(problem, progress, strategy, schedules, prove, simplest_within)[0]
    found = _searched(problem, progress, strategy, simplest_within)
    return _planned(problem, *found, progress, schedules, prove, bounded=bounded)


@no_collector()
@for_each_library
def plan_and_explain(
    cluster: Cluster,
    workload: Workload,
    *,
    profile: Profile | None = None,
    progress: Progress | None = None,
    make_costs: MakeCosts = CostModel,
    strategy: str = "auto",
    objective: Objective = THROUGHPUT,
    schedules: Schedules = "counts",
    prove: bool = False,
    simplest_within: float | None = None,
    plugin_gain: float | None = None,
) -> tuple[Plan, Explanation]:
    """Return `plan_cluster`, with why the plan is good from the same search.

    With `plugin_gain`, a plan that gains no more than this part over the best of all that stock
    Megatron's flags can say gives way to that one, and so does a slower one.  Interrupted (Ctrl-C)
    once a plan is found, it returns the best so far and says so in both.
    """
    problem = checked(
        make_problem(cluster, workload, profile, make_costs, objective),
        schedules, strategy, prove, simplest_within,
    )  # fmt: skip
    # Only the usual search may give way to flags: what was asked for by name stays.
    is_usual = strategy == "auto" and schedules == "counts" and simplest_within is None
    gain = plugin_gain if is_usual else None
    return _explained(problem, progress, strategy, schedules, prove, simplest_within, gain)


def _explained(
    problem: Problem,
    progress: Progress | None,
    strategy: str,
    schedules: Schedules,
    prove: bool,
    simplest_within: float | None,
    plugin_gain: float | None = None,
) -> tuple[Plan, Explanation]:
    stock_only = problem.objective.stock_only
    # Search; if nothing fits, stock Megatron's own search may still find a plan.
    try:
        board, first, best = _searched(problem, progress, strategy, simplest_within)
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
    plan = _planned(problem, board, first, best, progress, schedules, prove)
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
    # A bound that was never simulated proves no plan.
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


def _searched(
    problem: Problem, progress: Progress | None, strategy: str, simplest_within: float | None
) -> tuple[Scoreboard, Candidate, Candidate]:
    """Return the board, the board's best candidate, and the candidate asked for."""
    board = search(problem, progress, strategies_of("auto" if strategy == STOCK else strategy))
    while True:
        # Take the best, or fail with the reason.
        first = _first(problem, board)
        # Another candidate than the fastest: the simplest near it, or with exchange groups.
        best = first
        if simplest_within is not None and not board.interrupted:
            best = simplest(board, first, simplest_within)
        elif not (board.interrupted or board.is_exact):
            best = with_groups(problem, board, first)
        # The operations of all ranks have to end under NCCL's rules, or the next best is taken.
        refused = hanging(problem, best)
        if refused is None:
            return board, first, best
        Rescorer(board).refuse(refused)
        if len(board.refused) == _MAX_REFUSED:
            raise _none_runs(board)


def _first(problem: Problem, board: Scoreboard) -> Candidate:
    """Return the best candidate of the board that no proof has refused."""
    try:
        is_stock = problem.objective.stock_only
        return stock_or_error(problem, board) if is_stock else best_or_error(problem, board)
    except InfeasiblePlanError as error:
        if not board.refused:
            raise
        raise _none_runs(board) from error


def _none_runs(board: Scoreboard) -> InfeasiblePlanError:
    """Return the error to raise where the proof of operations refused all plans it was asked of."""
    fastest = board.refused[0]
    deepest = max(len(replica.stages) for replica in fastest.candidate.placement.replicas)
    return InfeasiblePlanError(
        f"{fastest.why}\nNo job could run the fastest plan, whose pipelines have up to {deepest} "
        f"stages, nor the next {len(board.refused) - 1}. Plan shorter ones: `limits: "
        f"{{max_pipeline_parallel: {max(deepest * 3 // 4, 1)}}}` in the cluster file"
    )


def _planned(
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
    objective = problem.objective
    is_proved = board.is_exact and not (
        objective.stock_only or objective.may_want_fewer(problem.cluster)
    )
    if is_proved and plan.estimates is not None:
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
    """Yield nearly as fast plans of other shapes, if the objective compares plans by step time."""
    if problem.objective.name != "throughput":
        return
    most_s = (1 + USUAL_PART) * best.step_time_s
    for candidate in distinct(board.ranking_of_all)[:NUM_NEAR]:
        if candidate.placement != best.placement and candidate.step_time_s <= most_s:
            yield bare_plan(problem, candidate, idle_reasons(problem, candidate))


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
