"""Megatron flags missing from the job that would shorten the step of the job's plan.

Each is really priced: the plan, as it is, under the flags, with the same cost model.  Only flags
that leave the numbers what they are (to rounding) are tried.  A search under them may find a plan
that gains more.

A larger micro-batch is priced too where it would change the objective, so that the search keeps
the job's: its line says so.

Two more are tried where they let idle GPUs train, because these lack bf16: --fp16 in place of
--bf16, and `plan --stage-precision mixed`. Their plans are others, so they are searched for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd, inf
from typing import Any

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import HeteroError, InfeasiblePlanError, UnsupportedError
from megatron_hetero.model.micro_batches import size_changes_objective
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.api import plan_cluster
from megatron_hetero.planner.division.counts import MIN_GAIN
from megatron_hetero.planner.restrictions.mixture import MIXED, with_mixed_precisions
from megatron_hetero.planner.restrictions.precision import lacking, used_types, with_precision
from megatron_hetero.schedule.estimate import estimate_plan

DIVIDE, OVERLAP, GATHER = (
    "--use-distributed-optimizer",
    "--overlap-grad-reduce",
    "--overlap-param-gather",
)
_FIELDS = {
    DIVIDE: "use_distributed_optimizer",
    OVERLAP: "overlap_grad_reduce",
    GATHER: "overlap_param_gather",
}
_TRIED = ((DIVIDE,), (OVERLAP,), (DIVIDE, OVERLAP), (DIVIDE, OVERLAP, GATHER))
"""Each after its parts; Megatron gathers parameters in the buckets of the second alone."""


@dataclass(frozen=True)
class FlagGain:
    """What flags would bring: a step of `step_time_s` in the place of `from_s`."""

    flags: tuple[str, ...]
    from_s: float
    step_time_s: float
    in_place_of: str | None = None
    """The flag that goes away."""
    joining: str = ""
    """GPUs that train only then."""
    changes_objective: bool = False
    """True if the flag changes the aim of the training."""

    @property
    def gain(self) -> float:
        """Return the saved part of the step."""
        return 1 - self.step_time_s / self.from_s


def faster_flags(
    plan: Plan, cluster: Cluster, profile: Profile | None = None
) -> tuple[FlagGain, ...]:
    """Return flags that gain, the greatest gain first; sets only where they gain more than their
    parts.

    Of a plan of one replica, whose gradients nobody exchanges, and of one whose passes are split,
    only the precision; nothing for one that cannot be priced.
    """
    if plan.workload is None:
        return ()
    try:
        from_s = estimate_plan(plan, cluster, profile, bounded=False).step_time_s
        found = list(_precision_gains(plan.workload, cluster, profile, from_s))
        found += _size_gain(plan, plan.workload, cluster, profile, from_s)
        if len(plan.replicas) > 1 and not _splits_passes(plan):
            found += _gains(plan, plan.workload, cluster, profile, from_s)
    except HeteroError:
        # Whoever made the plan has said what cannot be priced about it.
        return ()
    return tuple(sorted(found, key=lambda gain: gain.step_time_s))


def _gains(
    plan: Plan, workload: Workload, cluster: Cluster, profile: Profile | None, from_s: float
) -> Iterator[FlagGain]:
    best_of: dict[frozenset[str], float] = {}
    for flags in _TRIED:
        # Flags that the job has already gain nothing.
        lacking = tuple(flag for flag in flags if not getattr(workload.training, _FIELDS[flag]))
        if not lacking or frozenset(lacking) in best_of:
            continue
        asked = replace(plan, workload=_with_flags(workload, lacking))
        estimates = estimate_plan(asked, cluster, profile, bounded=False)
        # Under the flags, the plan may not fit any more.
        if any(d.peak_bytes > d.capacity_bytes for d in estimates.devices.values()):
            continue
        step_s = best_of[frozenset(lacking)] = estimates.step_time_s
        # More flags have to gain more than each part of them does.
        parts = (t for tried, t in best_of.items() if tried < frozenset(lacking))
        if step_s < min((from_s, *parts)) - MIN_GAIN * from_s:
            yield FlagGain(lacking, from_s, step_s)


def _size_gain(
    plan: Plan, workload: Workload, cluster: Cluster, profile: Profile | None, from_s: float
) -> Iterator[FlagGain]:
    """Yield the best larger micro-batch of the same plan, if the search keeps the job's because of
    what is trained."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    # A plan's orders and sizes are made for the job's own micro-batch.
    has_orders = any(s.order or s.num_launched_forwards is not None for s in stages)
    has_sizes = any(replica.micro_batch_size is not None for replica in plan.replicas)
    if has_orders or has_sizes or not size_changes_objective(workload):
        return
    own = workload.training.micro_batch_size
    most = gcd(*(replica.num_micro_batches for replica in plan.replicas))
    best_s, best = (1 - MIN_GAIN) * from_s, 0
    # Only sizes that divide all replicas' micro-batches keep the plan.
    for times in range(2, most + 1):
        if most % times:
            continue
        training = replace(workload.training, micro_batch_size=times * own)
        asked = replace(
            plan,
            workload=replace(workload, training=training),
            replicas=tuple(
                replace(r, num_micro_batches=r.num_micro_batches // times) for r in plan.replicas
            ),
        )
        estimates = estimate_plan(asked, cluster, profile, bounded=False)
        fits = all(d.peak_bytes <= d.capacity_bytes for d in estimates.devices.values())
        if fits and estimates.step_time_s < best_s:
            best_s, best = estimates.step_time_s, times * own
    if best:
        yield FlagGain((f"--micro-batch-size {best}",), from_s, best_s, changes_objective=True)


def _precision_gains(
    workload: Workload, cluster: Cluster, profile: Profile | None, from_s: float
) -> Iterator[FlagGain]:
    """Yield fp16 in place of bf16, and a precision for each stage, by the best plans with them."""
    training = workload.training
    if training.precision != "bf16" or training.mixes_precisions:
        return
    # GPU types that lack bf16, and those of them that have fp16.
    without = set(lacking(used_types(cluster), "bf16"))
    with_fp16 = without - set(lacking(used_types(cluster), "fp16"))
    tried = (
        (("--fp16",), "--bf16", with_fp16, with_precision(workload, "fp16")),
        ((MIXED,), None, without, with_mixed_precisions(workload)),
    )
    for flags, instead, joining, asked in tried:
        if joining:
            # Without idle GPUs that join there is no reason for another precision.
            yield from _gain_of_idle(flags, instead, joining, asked, cluster, profile, from_s)


def _gain_of_idle(
    flags: tuple[str, ...],
    instead: str | None,
    joining: set[str],
    asked: Workload,
    cluster: Cluster,
    profile: Profile | None,
    from_s: float,
) -> Iterator[FlagGain]:
    """Yield the gain of the best plan of the job `asked`, if some of `joining` train in the
    plan."""
    try:
        other = plan_cluster(cluster, asked, profile=profile, bounded=False)
    except (InfeasiblePlanError, UnsupportedError):
        return
    then = Counter(
        cluster.node_of(d).gpu_type.name
        for d in (d for r in other.replicas for s in r.stages for d in s.devices)
    )
    words = [f"{then[name]} {name}" for name in sorted(joining) if then[name]]
    step_s = other.estimates.step_time_s if other.estimates else inf
    if words and step_s < (1 - MIN_GAIN) * from_s:
        yield FlagGain(flags, from_s, step_s, instead, " and ".join(words))


def _with_flags(workload: Workload, flags: Sequence[str]) -> Workload:
    asked: dict[str, Any] = {_FIELDS[flag]: True for flag in flags}
    training = replace(workload.training, **asked)
    return replace(workload, training=training, megatron_args=(*workload.megatron_args, *flags))


def _splits_passes(plan: Plan) -> bool:
    """Return whether passes are split into I and W; such an order refuses overlaps
    (`runtime.job.checks.refused_flags`)."""
    return any("I" in (stage.order or "") for r in plan.replicas for stage in r.stages)
