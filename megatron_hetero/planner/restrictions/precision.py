"""The precision of a job that names none: one that all its cards have, or the faster choice.

bf16 where every GPU computes in it.  Where some do not (RTX 20, V100), fp16 on all of them or bf16
on the others, whichever trains faster.  `limits.as_given: [precision]` keeps Megatron's fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.widths import usable_gpus
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Precision
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.objective import THROUGHPUT, Objective
from megatron_hetero.planner.restrictions.one_library import unused_reason, value_of
from megatron_hetero.units import format_duration

_PREFERRED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
"""bf16 needs no loss scaling; fp32 takes twice the memory of activations and most of the speed."""


@dataclass(frozen=True)
class ChosenPrecision[Found]:
    """Result of a search in the chosen precision, with the reason for the choice; no words if the
    job names a precision."""

    found: Found
    words: str


def in_best_precision[Found](
    search: Callable[[Workload], Found],
    plan_in: Callable[[Found], Plan],
    cluster: Cluster,
    workload: Workload,
    objective: Objective = THROUGHPUT,
) -> ChosenPrecision[Found]:
    """Search in each precision that may be chosen, and take the best.

    Args:
        search: a search for a plan; `plan_in` is the plan of what it finds.
    Raises:
        InfeasiblePlanError: nothing fits in any; that of the first.
    """
    tried: dict[Precision, Found] = {}
    refused: list[InfeasiblePlanError] = []
    choices = precisions(cluster, workload)
    # Search in each, unless it is interrupted.
    for precision in choices:
        try:
            tried[precision] = search(with_precision(workload, precision))
        except InfeasiblePlanError as error:
            refused.append(error)
        except KeyboardInterrupt:
            if not tried:
                raise
            break
        else:
            if plan_in(tried[precision]).made_by.endswith("(interrupted)"):
                break
    if not tried:
        raise refused[0]
    # The best by the objective; say why if it is not the job's own.
    best = min(tried, key=lambda precision: value_of(plan_in(tried[precision]), objective))
    if best == workload.training.precision:
        return ChosenPrecision(tried[best], "")
    words = f"Precision: {best}, for the job names none and {_why(cluster, best)}"
    for other in choices:
        if other != best:
            plan = plan_in(tried[other]) if other in tried else None
            beside = "nothing fits" if plan is None or plan.estimates is None else (
                f"{format_duration(plan.estimates.step_time_s)} a step"
            )  # fmt: skip
            words += f"; in {other}: {beside}"
    return ChosenPrecision(tried[best], words)


def precisions(cluster: Cluster, workload: Workload) -> tuple[Precision, ...]:
    """Return what a plan may choose from: the job's own if it names one; else what some GPUs
    have, each only if more have it than those before."""
    own = workload.training.precision
    # Megatron's fp32 is what a job has that names no precision.
    if own != "fp32" or "precision" in cluster.limits.as_given:
        return (own,)
    gpus = used_types(cluster)
    choices: list[Precision] = []
    fewest = len(gpus)
    for precision in _PREFERRED:
        # A further precision has to let more GPU types train.
        if len(lacking(gpus, precision)) < fewest:
            fewest = len(lacking(gpus, precision))
            choices.append(precision)
    return tuple(choices) or (own,)


def with_precision(workload: Workload, precision: Precision) -> Workload:
    """Return the job in a precision: its flag among the job's, in place of another."""
    own = workload.training.precision
    if own == precision:
        return workload
    args = tuple(arg for arg in workload.megatron_args if arg != f"--{own}")
    training = replace(workload.training, precision=precision)
    flag = () if precision == "fp32" else (f"--{precision}",)
    return replace(workload, training=training, megatron_args=(*args, *flag))


def used_types(cluster: Cluster) -> list[GpuType]:
    """Return types of the GPUs that a plan may use, whatever the precision."""
    types = {
        node.gpu_type.name: node.gpu_type
        for node in cluster.nodes
        if usable_gpus(cluster, node) and not unused_reason(cluster, node)
    }
    return [types[name] for name in sorted(types)]


def lacking(gpus: list[GpuType], precision: Precision) -> list[str]:
    """Return names of the types that cannot compute in a precision."""
    return [gpu.name for gpu in gpus if gpu.peak_flops.get(precision) is None]


def _why(cluster: Cluster, best: Precision) -> str:
    without = lacking(used_types(cluster), "bf16")
    if not without:
        return "all GPUs have it"
    names = ", ".join(without)
    if best == "bf16":
        return f"{names}, which {'lacks' if len(without) == 1 else 'lack'} it, would gain less"
    return f"{names} {'has' if len(without) == 1 else 'have'} no bf16"
