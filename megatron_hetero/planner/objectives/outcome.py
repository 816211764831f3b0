"""The meaning of a plan for a whole training run, and the message if no plan keeps the limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import isinf

from megatron_hetero.bounds.divided import bound_with_context_parallel_s, divided_bound_s
from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cost.price import Price, price_of
from megatron_hetero.errors import InfeasiblePlanError, some_of
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.objective import ObjectiveName
from megatron_hetero.planner.objectives.objective_bound import (
    ObjectiveBound,
    none_keeps_the_limits,
    objective_bound,
)
from megatron_hetero.planner.problem import Problem
from megatron_hetero.units import HOUR_S, MILLION, format_duration


@dataclass(frozen=True)
class Outcome:
    """A plan by its objective.  What cannot be known without prices or a number of steps is None.

    `value` is what the objective made small: seconds of a step (throughput), money for a million
    tokens (cheapest), or GPUs (fewest-gpus).  `bound` is a value that no plan under the same limits
    beats, `gap = value / bound - 1`, and `bound_relaxes` says what the bound leaves out.  Where
    it is of plans without context parallelism alone, none with it, in equal parts, beats
    `bound_with_context_parallel`; 0 if nothing is known of these.  Of
    `run_price`, `run_traffic_price` is for traffic between sites; `price_per_hour` is of machines.
    """

    objective: ObjectiveName
    value: float
    bound: float | None
    gap: float | None
    bound_relaxes: str
    bound_with_context_parallel: float | None
    num_steps: float | None
    num_tokens: float | None
    run_hours: float | None
    run_price: float | None
    run_traffic_price: float | None
    price_per_hour: float | None
    deadline_hours: float | None
    budget: float | None
    max_price_per_hour: float | None


def outcome_of(problem: Problem, board: Scoreboard, best: Candidate) -> Outcome:
    """Return the outcome of the best plan of a board."""
    objective, num_steps = problem.objective, problem.objective.num_steps
    price = price_of(problem.costs, best.placement, best.cost)
    step_s, tokens = best.step_time_s, _tokens_per_step(problem)
    per_million = MILLION / tokens
    # The bound of the objective, if it is finite.
    bound = objective_bound(problem)
    if bound is not None and isinf(bound.value):
        bound = None  # queues made a plan that keeps the limits slower than they allow
    # The objective's value, in its unit.
    match objective.name:
        case "throughput":
            value, unit = step_s, 1.0
        case "cheapest":
            value, unit = price.of_step(step_s) * per_million if price else 0.0, per_million
        case "fewest-gpus":
            value, unit = float(sum(1 for _ in best.placement.devices())), 1.0
    # Every plan was priced: the value is its own bound.
    if board.is_exact:
        bound = ObjectiveBound(value / unit, "nothing: every plan was priced")
    # In the objective's unit; a plan is never better than its bound.
    least = None if bound is None else min(bound.value * unit, value)
    return Outcome(
        objective=objective.name,
        value=value,
        bound=least,
        gap=value / least - 1 if least else None,
        bound_relaxes="" if bound is None else bound.relaxes,
        bound_with_context_parallel=_divided_bound(problem, None if bound is None else bound.value),
        num_steps=num_steps,
        num_tokens=None if num_steps is None else num_steps * tokens,
        run_hours=None if num_steps is None else num_steps * step_s / HOUR_S,
        run_price=None if num_steps is None or price is None else num_steps * price.of_step(step_s),
        run_traffic_price=(
            None if num_steps is None or price is None else num_steps * price.egress_per_step
        ),
        price_per_hour=None if price is None else price.per_hour,
        deadline_hours=None if objective.deadline_s is None else objective.deadline_s / HOUR_S,
        budget=objective.budget,
        max_price_per_hour=problem.cluster.limits.max_price_per_hour,
    )


def _divided_bound(problem: Problem, bound: float | None) -> float | None:
    """Return what no plan with context parallelism beats beside a bound of plans without; money
    and GPUs are not bounded for these."""
    if bound is None or isinf(divided_bound_s(problem.costs)):
        return None
    if problem.objective.name != "throughput":
        return 0.0
    return bound_with_context_parallel_s(problem.costs, bound)


def limits_error(problem: Problem, nearest: Candidate, what: str = "plan") -> InfeasiblePlanError:
    """Say that plans fit into memory, but none found is fast and cheap enough: the nearest, and
    what limit it would keep."""
    price = price_of(problem.costs, nearest.placement, nearest.cost)
    kept = list(_limits_beside(problem, nearest.step_time_s, price))
    limits = ", ".join(f"{name} {limit}" for name, limit, _ in kept)
    wanted = ", ".join(f"{name} {found}" for name, limit, found in kept if found != limit)
    devices = list(nearest.placement.devices())
    names = sorted({machine_of(device.node) for device in devices})
    proof = " That none can is proved, by a lower bound." if none_keeps_the_limits(problem) else ""
    return InfeasiblePlanError(
        f"No {what} was found that keeps {limits}.{proof} The nearest, on {len(devices)} GPUs of "
        f"{some_of(names)}, takes {format_duration(nearest.step_time_s)} a step and would keep "
        f"{wanted}. Allow that, or give more or other machines."
    )


def _limits_beside(
    problem: Problem, step_s: float, price: Price | None
) -> Iterator[tuple[str, str, str]]:
    """Yield each limit of time and money: its name, the limit, and the least limit that a plan
    keeps (the limit itself where it does keep it)."""
    objective = problem.objective
    limit = problem.cluster.limits.max_price_per_hour
    if objective.deadline_s is not None and objective.num_steps is not None:
        yield _limit(
            "--deadline", objective.deadline_s / HOUR_S, objective.num_steps * step_s / HOUR_S
        )
    if price is not None and limit is not None:
        yield _limit("limits.max_price_per_hour", limit, price.per_hour)
    if price is not None and objective.budget is not None and objective.num_steps is not None:
        yield _limit("--budget", objective.budget, objective.num_steps * price.of_step(step_s))


def _limit(name: str, limit: float, needed: float) -> tuple[str, str, str]:
    unit = " h" if name == "--deadline" else ""
    text = f"{limit:.6g}{unit}"
    if needed <= limit:
        return name, text, text
    return name, text, f"{_rounded_up(needed):.6g}{unit}"


def _rounded_up(value: float) -> float:
    """Round to four figures, never down: typed as a limit it is kept."""
    rounded = float(f"{value:.4g}")
    return rounded if rounded >= value else float(f"{value * 1.001:.4g}")


def _tokens_per_step(problem: Problem) -> int:
    workload = problem.workload
    return workload.training.global_batch_size * workload.model.seq_length
