"""The predicted time and memory of a placement, as plan.json holds them (`Estimates`)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from math import inf

from megatron_hetero.bounds.divided import bound_with_context_parallel_s, divided_bound_s
from megatron_hetero.bounds.free_groups import FREE_GROUPS_RELAX, free_groups_bound_s
from megatron_hetero.bounds.space import why_outside
from megatron_hetero.bounds.step_time import (
    WORK_BOUND_RELAXES,
    Bound,
    Prove,
    thorough_bound,
    work_bound_s,
)
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.price import Price, price_of
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.errors import BoundFaultWarning, UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.estimates import DeviceEstimate, Estimates, TrafficEstimate
from megatron_hetero.plan.plan import Plan
from megatron_hetero.rounding import at_most
from megatron_hetero.units import HOUR_S, MILLION


def workload_of(plan: Plan) -> Workload:
    """Return the model of a plan, and how it is trained.

    Raises:
        UsageError: the plan carries none.
    """
    if plan.workload is None:
        raise UsageError(
            "the plan carries no model, so its time cannot be predicted; "
            "make it with `megatron-hetero plan`, or give the model"
        )
    return plan.workload


def estimates_of(
    costs: CostModel,
    placement: Placement,
    cost: PlacementCost,
    *,
    in_parts: bool = False,
    is_stock: bool = False,
    prove: Prove | None = thorough_bound,
) -> Estimates:
    """Return the figures of an already priced placement in the form that plan.json holds.

    Args:
        in_parts: stages are in chunks, or backward passes are split; the bound is that of the work
            alone, which holds for them too.
        is_stock: `cost` is as stock Megatron runs the placement, whose exchange of gradients is
            another than the one that the bound is of.
        prove: what finds the bound; None where nobody asks for it.

    A plan that exchanges gradients by groups of machines has the bound of the work alone, which
    holds for any exchange.

    Without a bound where the placement is none that the search may find (`bounds.space`): a plan
    edited by hand, or with groups over several nodes, which are searched but not bounded.  The
    bound of a plan with a group of a width that does not divide the model is of all such groups;
    that of another plan is not.
    """
    workload = costs.workload
    # Money and tokens of a step.
    price = price_of(costs, placement, cost)
    tokens = workload.training.global_batch_size * workload.model.seq_length
    # The bound, in the space in which it holds.
    bound = (
        _bound_of(costs, placement, cost, prove, in_parts=in_parts, is_stock=is_stock)
        if prove is not None
        else None
    )
    divided_s = None if bound is None else bound_with_context_parallel_s(costs, bound.step_time_s)
    # Memory of every device, part by part.
    devices = {}
    for replica, replica_cost in zip(placement.replicas, cost.replicas, strict=True):
        for stage, stage_cost in zip(replica.stages, replica_cost.stages, strict=True):
            for tensor_rank, device in enumerate(stage.devices):
                memory = stage_cost.device_memory(tensor_rank)
                devices[device.name] = DeviceEstimate(
                    memory.capacity_bytes,
                    memory.peak_bytes(stage.num_layers),
                    memory.parts_bytes(stage.num_layers),
                )
    return Estimates(
        step_time_s=cost.step_time_s,
        tokens_per_s=tokens / cost.step_time_s,
        bound_s=None if bound is None else min(bound.step_time_s, cost.step_time_s),
        gap=None if bound is None else max(0.0, cost.step_time_s / bound.step_time_s - 1),
        replica_times_s=tuple(r.pipeline_s for r in cost.replicas),
        stage_times_s=tuple(tuple(s.times.total_s for s in r.stages) for r in cost.replicas),
        boundary_times_s=tuple(tuple(h.total_s for h in r.forward_hops) for r in cost.replicas),
        gradient_sync_s=cost.gradient_sync_s,
        devices=devices,
        bound_relaxes="" if bound is None else bound.relaxes,
        bound_with_context_parallel_s=divided_s,
        measured=cost.measured,
        price_per_hour=None if price is None else price.per_hour,
        price_per_million_tokens=(
            None if price is None else price.of_tokens(MILLION, cost.step_time_s, tokens)
        ),
        traffic_price_per_hour=(
            None if price is None else price.egress_per_step * HOUR_S / cost.step_time_s
        ),
        traffic=() if price is None else tuple(_traffic(price, cost.step_time_s)),
    )


_MAX_CAUSES = 24
"""Causes of traffic that a plan names separately."""


def _traffic(price: Price, step_time_s: float) -> Iterator[TrafficEstimate]:
    """Yield the dearest causes, and the sum of the rest for each pair of sites."""
    steps_per_hour = HOUR_S / step_time_s
    others: dict[tuple[str, str], tuple[float, float]] = {}
    # Causes come dearest first, so that those beyond the limit are the cheap ones.
    for number, part in enumerate(price.traffic):
        if number >= _MAX_CAUSES:
            carried, spent = others.get(part.sites, (0.0, 0.0))
            others[part.sites] = carried + part.num_bytes, spent + part.price
            continue
        cause = "gradients"
        if part.boundary is not None:
            replica, stage = part.boundary
            cause = f"replica {replica}, stages {stage} to {stage + 1}"
        yield TrafficEstimate(cause, part.sites, part.num_bytes, part.price * steps_per_hour)
    for sites, (carried, spent) in others.items():
        yield TrafficEstimate("others", sites, carried, spent * steps_per_hour)


def _bound_of(
    costs: CostModel,
    placement: Placement,
    cost: PlacementCost,
    prove: Prove,
    *,
    in_parts: bool,
    is_stock: bool,
) -> Bound | None:
    """Return the bound on the step of a placement; None where it is of others, or wrong."""
    # Divided sequences first: their bound holds for all plans, and other spaces exclude them.
    if placement.has_context_parallel and why_outside(costs, placement, cost, divided=True) is None:
        return _bound_of_divided(costs, cost)
    if why_outside(costs, placement, cost) is not None:
        return _bound_of_free_groups(costs, placement, cost)
    bound = Bound(inf, "")
    other_exchange = bool(placement.exchange_groups)
    if not (in_parts or other_exchange):
        # More than this need not be proved: a bound beyond the step is a fault already.
        bound = prove(costs, 1.01 * cost.step_time_s, uneven=placement.has_shares)
    # The work alone bounds other orders of passes too, and other exchanges of gradients.
    if not at_most(bound.step_time_s, cost.step_time_s) and (
        in_parts or is_stock or other_exchange
    ):
        work_s = work_bound_s(costs, in_parts=True, uneven=placement.has_shares)
        bound = Bound(work_s, WORK_BOUND_RELAXES)
    if at_most(bound.step_time_s, cost.step_time_s):
        return bound
    _warn_of_fault(bound, cost)
    return None


def _bound_of_divided(costs: CostModel, cost: PlacementCost) -> Bound | None:
    """Return the bound of a plan with stages whose groups divide sequences; it holds for all."""
    bound = Bound(divided_bound_s(costs), WORK_BOUND_RELAXES)
    if at_most(bound.step_time_s, cost.step_time_s):
        return bound if bound.step_time_s else None
    _warn_of_fault(bound, cost)
    return None


def _bound_of_free_groups(
    costs: CostModel, placement: Placement, cost: PlacementCost
) -> Bound | None:
    """Return the bound of a plan whose groups are of unlike GPUs, or over several nodes."""
    if why_outside(costs, placement, cost, free_groups=True) is not None:
        return None
    step_s = free_groups_bound_s(costs)
    if step_s is None:
        return None
    bound = Bound(step_s, FREE_GROUPS_RELAX)
    if at_most(step_s, cost.step_time_s):
        return bound
    _warn_of_fault(bound, cost)
    return None


def may_be_proved_further(plan: Plan) -> bool:
    """Return whether more effort may raise the bound of a plan: not where it is by work alone,
    whatever the effort, since the plan divides sequences, exchanges gradients by groups of
    machines, or has groups of unlike GPUs."""
    if plan.estimates is None or plan.estimates.bound_s is None:
        return False
    by_work = plan.layout.has_context_parallel or bool(plan.exchange_groups)
    return not by_work and plan.estimates.bound_relaxes != FREE_GROUPS_RELAX


def _warn_of_fault(bound: Bound, cost: PlacementCost) -> None:
    """Ask for a report of a bound above a plan's step."""
    warnings.warn(
        f"the lower bound of {bound.step_time_s:.6g} s is above the step of this plan, "
        f"{cost.step_time_s:.6g} s: a fault in megatron-hetero. The plan is right and is given "
        "without a bound. Please report it, with the files and flags of this command",
        BoundFaultWarning,
        stacklevel=2,
    )
