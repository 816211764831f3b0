"""Invariants of a plan's estimates: they are of this plan, and possible.

They come after all other invariants of a plan by itself: an edited plan is wrong before its old
figures are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from megatron_hetero.plan.checks.violation import Violation, stages
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.plan import Plan
from megatron_hetero.rounding import at_most
from megatron_hetero.units import format_bytes

_STALE = (
    "The figures are of the plan before an edit: remove `estimates`, and let `megatron-hetero "
    "explain PLAN --cluster CLUSTER.YAML` predict new ones."
)


def estimates_have_the_plans_shape(plan: Plan) -> Iterator[Violation]:
    """Find estimates with other numbers of replicas, stages, boundaries or devices."""
    if plan.estimates is None:
        return
    estimates, num_stages = plan.estimates, [len(r.stages) for r in plan.replicas]
    # Field -> (numbers in the estimates, numbers in the plan), by replica where it has stages.
    shapes = {
        "replica_times_s": (len(estimates.replica_times_s), len(num_stages)),
        "stage_times_s": ([len(t) for t in estimates.stage_times_s], num_stages),
        "boundary_times_s": (
            [len(t) for t in estimates.boundary_times_s],
            [n - 1 for n in num_stages],
        ),
    }
    for field, (found, wanted) in shapes.items():
        if found != wanted:
            yield Violation(
                ("estimates", field),
                f"estimates.{field} has {found} entries, the plan needs {wanted}. {_STALE}",
            )
    devices = {device for _, _, stage in stages(plan) for device in stage.devices}
    for device in sorted(set(estimates.devices) - devices):
        yield Violation(
            ("estimates", "devices", device),
            f"estimates.devices names {device}, which is in no stage. {_STALE}",
        )


def estimates_are_possible(plan: Plan) -> Iterator[Violation]:
    """Find estimates that are negative or not finite, and a bound above the step."""
    if plan.estimates is None:
        return
    for field, value in _amounts(plan.estimates):
        if not (math.isfinite(value) and value >= 0):
            yield Violation(
                ("estimates", field), f"estimates.{field} holds {value}; allowed is 0 or more."
            )
    # The bound and the step time are rounded on their own; `at_most` allows for that.
    bound, step = plan.estimates.bound_s, plan.estimates.step_time_s
    if bound is not None and not at_most(bound, step):
        yield Violation(
            ("estimates", "bound_s"),
            f"estimates.bound_s is {bound}, above step_time_s {step}; a lower bound cannot be.",
        )
    # The plan may say by itself that it does not fit, whatever the cluster.
    for device, memory in sorted(plan.estimates.devices.items()):
        if memory.peak_bytes > memory.capacity_bytes:
            yield Violation(
                ("estimates", "devices", device, "peak_bytes"),
                f"{device} needs {format_bytes(memory.peak_bytes)} at its peak and has "
                f"{format_bytes(memory.capacity_bytes)}: "
                f"{format_bytes(memory.peak_bytes - memory.capacity_bytes)} too much. "
                "Give its stage fewer layers, more devices or recompute.",
            )


def _amounts(estimates: Estimates) -> Iterator[tuple[str, float]]:
    yield "step_time_s", estimates.step_time_s
    yield "tokens_per_s", estimates.tokens_per_s
    yield "gradient_sync_s", estimates.gradient_sync_s
    for field in ("price_per_hour", "price_per_million_tokens", "traffic_price_per_hour"):
        price = getattr(estimates, field)
        if price is not None:
            yield field, price
    for part in estimates.traffic:
        yield from (("traffic", v) for v in (part.bytes_per_step, part.price_per_hour))
    for field in ("bound_s", "bound_with_context_parallel_s"):
        bound_s = getattr(estimates, field)
        if bound_s is not None:
            yield field, bound_s
    # The gap may fall below 0 by rounding, and only a number that is not finite is at fault.
    yield from (("gap", max(v, 0.0)) for v in [estimates.gap] if v is not None)
    yield from (("replica_times_s", v) for v in estimates.replica_times_s)
    yield from (("stage_times_s", v) for times in estimates.stage_times_s for v in times)
    yield from (("boundary_times_s", v) for times in estimates.boundary_times_s for v in times)


INVARIANTS = (estimates_have_the_plans_shape, estimates_are_possible)
