"""Placements that no job could run: on GPUs their operations wait for each other in a circle."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.planner.evaluate.candidate import Candidate
from megatron_hetero.planner.evaluate.written import bare_plan
from megatron_hetero.planner.problem import Problem
from megatron_hetero.schedule.proof.check import check_operations


@dataclass(frozen=True)
class Hanging:
    """A candidate that hangs, and the ranks that wait for each other, in words."""

    candidate: Candidate
    why: str


def hanging(problem: Problem, candidate: Candidate) -> Hanging | None:
    """Return the candidate with the reason for which no job could run the candidate; None where all
    operations end under NCCL's rules, and for what stock Megatron runs."""
    plan = bare_plan(problem, candidate, {})
    try:
        check_operations(plan, plan.workload or problem.workload)
    except PlanFormatError as error:
        return Hanging(candidate, str(error))
    return None


def operations_of(candidate: Candidate) -> Hashable:
    """Return what decides the order of a candidate's operations: all but its GPUs, its layers and
    the settings of its stages."""
    placement = candidate.placement
    replicas = tuple(
        (
            r.num_micro_batches,
            r.micro_batch_size,
            r.num_in_flight,
            tuple((s.width, s.context_parallel, s.num_sharded_layers > 0) for s in r.stages),
        )
        for r in placement.replicas
    )
    return replicas, placement.exchange_groups, candidate.is_stock
