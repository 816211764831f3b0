"""The best plan that stock Megatron runs, as the plan.

`plan --stock` searches briefly. `plan --strategy stock` searches the same plans until no further
one can be faster, which takes minutes where there are many GPUs.
"""

from __future__ import annotations

from dataclasses import replace
from math import isfinite

from megatron_hetero.cost.placing import placement_of
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.alternatives import by_hand_alternatives
from megatron_hetero.planner.advise.explain import Explanation, explain_candidate
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.objectives.outcome import outcome_of
from megatron_hetero.planner.portfolio import search
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.stock.best import StockResult
from megatron_hetero.planner.stock.plan import priced_step_s
from megatron_hetero.planner.stock.search import stock_beside_a_plan
from megatron_hetero.schedule.estimate import estimate_plan, plan_cost

STOCK = "stock"
"""The name of the long search as a strategy. The name is not in `portfolio`, because the strategy
may change the job's flags."""


def check_stock_objective(problem: Problem) -> None:
    """Refuse the strategy where more counts than speed.

    Raises:
        UnsupportedError: the objective is another than speed.
    """
    objective = problem.objective
    if objective.may_want_fewer(problem.cluster) or objective.deadline_s is not None:
        raise UnsupportedError(
            f"--strategy {STOCK} looks for the fastest plan alone, not for limits of time and "
            "money; use --stock with --objective, --deadline, --budget or a limit of price"
        )


def searched_stock_plan(problem: Problem, every: bool) -> StockResult | None:
    """Return the best plan of all that stock flags can say; None where none fits, and where speed
    is not all that counts.

    Args:
        every: until no plan of the space can be faster, which takes minutes on many GPUs.
    """
    return stock_beside_a_plan(problem, every) if problem.objective.deadline_s is None else None


def as_its_plan(problem: Problem, found: StockResult) -> StockResult | None:
    """Return what was found with the step of its plan in place of what two short steps told; None
    where the plan needs more memory than they knew of."""
    if found.is_simulated:
        return found
    step_s = priced_step_s(problem, found.plan)
    return replace(found, step_time_s=step_s, is_simulated=True) if isfinite(step_s) else None


def stock_plan_and_explanation(
    problem: Problem, found: StockResult, num_priced: int
) -> tuple[Plan, Explanation]:
    """Return the plan of a search over stock flags, with its own micro-batch size and recompute.

    Args:
        num_priced: plans that it was compared with, beside those of its own search.
    """
    plan, cluster, profile = found.plan, problem.cluster, problem.costs.profile
    own = make_problem(cluster, plan.workload or problem.workload, profile)
    placement = placement_of(plan, cluster)
    candidate = Candidate(placement, plan_cost(plan, own.costs, placement), STOCK)
    board = search(own, None, ())
    faster = "the best plan of stock Megatron is faster without"
    reasons = {device: own.idle_reasons.get(device, faster) for device in plan.idle_devices}
    explanation = explain_candidate(own, board, candidate, reasons, found)
    explanation = replace(
        explanation,
        outcome=outcome_of(own, board, candidate),
        num_priced=num_priced + found.num_simulated,
        # By hand the job's own settings are kept, which this plan may change.
        by_hand=by_hand_alternatives(
            problem, candidate, frozenset({own.workload.training.micro_batch_size})
        ),
    )
    if explanation.best_stock is not None:
        itself = replace(explanation.best_stock, slower_by=0.0)
        explanation = replace(explanation, best_stock=itself)
    # The step that the candidate has, as `explain` and `simulate` give it.
    estimates = estimate_plan(plan, cluster, profile)
    return replace(plan, idle_reasons=reasons, estimates=estimates), explanation
