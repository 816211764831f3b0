"""Ways to ask for a plan that do not go together."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megatron_hetero.cost.choices import may_choose
from megatron_hetero.errors import UsageError
from megatron_hetero.planner.problem import Problem
from megatron_hetero.planner.stock_strategy import STOCK, check_stock_objective

Schedules = Literal["counts", "best"]
USUAL = frozenset({"auto", "thorough"})
"""Strategies that look for the fastest plan of all, which may be stock Megatron's."""
PLUGIN_GAIN = 0.02
"""Part of a step: a plan with the plug-in that gains no more gives way to stock Megatron's best,
unless a user says otherwise."""


def checked(
    problem: Problem, schedules: Schedules, strategy: str, prove: bool, within: float | None
) -> Problem:
    """Return the problem, of stock plans where the strategy asks for them.

    Raises:
        UsageError, UnsupportedError: two of the wishes do not go together.
    """
    _check_schedules(problem, schedules, strategy)
    _check_proof(prove, schedules, strategy)
    _check_simplest(within, schedules, strategy)
    if problem.objective.shards_layers and (strategy == "exact" or schedules == "best"):
        other = "--strategy exact" if strategy == "exact" else "--schedule best"
        raise UsageError(f"--shard-layers does not go with {other}: leave one of them away")
    if strategy != STOCK:
        return problem
    check_stock_objective(problem)
    return replace(problem, objective=replace(problem.objective, stock_only=True))


def _check_schedules(problem: Problem, schedules: Schedules, strategy: str) -> None:
    if schedules != "best":
        return
    if not may_choose(problem.costs, "schedule"):
        raise UsageError(
            "limits.as_given of the cluster file keeps the schedule as given: leave away either "
            "--schedule best or that limit"
        )
    if strategy == STOCK or problem.objective.stock_only:
        raise UsageError(
            "stock Megatron runs no other orders of computations than its own: leave away either "
            "--schedule best or what asks for a plan of stock Megatron"
        )


def _check_simplest(within: float | None, schedules: Schedules, strategy: str) -> None:
    if within is not None and (schedules == "best" or strategy == STOCK):
        other = "--schedule best" if schedules == "best" else f"--strategy {STOCK}"
        raise UsageError(f"--simplest does not go with {other}: leave one of them away")


def _check_proof(prove: bool, schedules: Schedules, strategy: str) -> None:
    if prove and (schedules == "best" or strategy == STOCK):
        other = "--schedule best" if schedules == "best" else f"--strategy {STOCK}"
        raise UsageError(f"--prove does not go with {other} yet: leave one of them away")
