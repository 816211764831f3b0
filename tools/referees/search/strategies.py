"""The search under other systems' prices: the problem of a question, and the strategies for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hetero.errors import UsageError
from megatron_hetero.planner.oracle.exhaustive import Exhaustive
from megatron_hetero.planner.problem import Problem, make_problem
from megatron_hetero.planner.seeds.constructive import Constructive
from megatron_hetero.planner.seeds.symmetric import Symmetric
from megatron_hetero.planner.strategy import Strategy
from tools.referees.cases import Question
from tools.referees.search.all_columns import AllColumns
from tools.referees.search.equal_replicas import EqualReplicas
from tools.referees.search.even_columns import EvenColumns
from tools.referees.search.local import LocalSearch
from tools.referees.search.mixed_shapes import MixedReplicas
from tools.referees.search.shape_layout import equal_shares
from tools.referees.waiting.rules import HasFillRules


def problem_of(question: Question) -> Problem:
    """Return what is searched: replicas take as many micro-batches each where the one with most
    sets the pace of all."""
    problem = make_problem(question.cluster, question.workload, None, question.make_costs)
    return replace(problem, divide_batch=_alike) if counts_alike(problem) else problem


def counts_alike(problem: Problem) -> bool:
    """Return whether the replica with most micro-batches sets the pace of all.

    Raises:
        UsageError: the prices are no referee's.
    """
    costs = problem.costs
    if not isinstance(costs, HasFillRules):
        raise UsageError(f"{type(costs).__name__} does not say how its pipelines fill")
    return costs.fill_rules().counts_alike


def referee_strategies(problem: Problem) -> tuple[Strategy, ...]:
    """Return the strategies in the order in which they run."""
    alike = counts_alike(problem)
    return (
        EvenColumns() if alike else AllColumns(),
        Symmetric(),
        Exhaustive(),
        Constructive(),
        MixedReplicas() if alike else EqualReplicas(),
        LocalSearch(),
    )


def _alike(
    number: int, fill_s: Sequence[float], period_s: Sequence[float]
) -> tuple[int, ...] | None:
    return equal_shares(number, len(fill_s))
