"""Precisions of the stages of a plan: what each computes in, and what crosses between two."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan

_FROM_NARROW: tuple[Precision, ...] = ("fp16", "bf16", "fp32")
"""fp16 and bf16 have as many bits; fp16 has the narrower range."""


def stage_precisions(plan: Plan, job: Precision) -> tuple[tuple[Precision, ...], ...]:
    """Return, by replica and stage, what each computes in; stages without their own as the job."""
    return tuple(tuple(s.precision or job for s in r.stages) for r in plan.replicas)


def narrowest(precisions: Iterable[Precision]) -> Precision:
    """Return the narrowest of some precisions: of a hop's two sides, what crosses.

    Of all stages it is what the job's optimizer works for: fp16 anywhere needs a loss scale, and
    any half precision main weights in fp32.
    """
    return min(precisions, key=_FROM_NARROW.index)


def mixes_precisions(plan: Plan, job: Precision) -> bool:
    """Tell if some stages compute in another precision than others."""
    return len({p for replica in stage_precisions(plan, job) for p in replica}) > 1


def own_precisions(plan: Plan) -> Iterator[tuple[int, int, Precision]]:
    """Yield replica, stage and precision of every stage with a precision of its own."""
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            if stage.precision is not None:
                yield r, s, stage.precision


def in_one_precision(plan: Plan) -> Plan:
    """Return the plan with all stages in the job's precision."""
    replicas = tuple(
        replace(r, stages=tuple(replace(s, precision=None) for s in r.stages))
        for r in plan.replicas
    )
    return replace(plan, replicas=replicas)
