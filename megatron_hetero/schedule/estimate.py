"""Predicted times of any plan, with queues on shared paths, for any order of computations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron_hetero.bounds.estimate import estimates_of, workload_of
from megatron_hetero.bounds.step_time import thorough_bound
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.plan.communication.libraries import kept_to_plan
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.simulator.shared_paths import num_messages, queued
from megatron_hetero.schedule.simulator.step import StepSimulation, simulate_plan
from megatron_hetero.schedule.simulator.timelines import StageTimeline
from megatron_hetero.schedule.stock import sends_as_stock

_MAX_STOCK_MESSAGES = 10_000
"""Steps of stock Megatron with more messages are not simulated whole, which takes seconds: their
pipelines are, like ones once, and the exchange around them with a step of one micro-batch."""


def estimate_plan(
    plan: Plan, cluster: Cluster, profile: Profile | None = None, *, bounded: bool = True
) -> Estimates:
    """Predict time and memory of a validated plan, even of a plan too large for the GPUs.

    The prediction includes queues on shared paths, chunks and orders of computations as they run,
    and the sends for which stock Megatron waits where it runs the plan.

    Orders of whole passes in stages of one piece keep the full bound, whose proof holds for any
    order (docs/bound.md).  Chunks and split backward passes have the bound of the work alone.

    Args:
        plan: validated, with devices of `cluster`.
        cluster: the machines and links.
        profile: measured times; None has the analytic model for all.
        bounded: prove the lower bound too, which takes far longer than the prediction.
    Raises:
        UsageError: the plan carries no workload.
        PlanFormatError: it names no devices, or devices that the cluster lacks.
        UnsupportedError: it asks for something that cannot be priced yet (named).
    """
    # Its bound is of the GPUs that a plan can have beside each other, as the search's was.
    cluster = kept_to_plan(cluster, plan)
    # Chunks are simulated at once: their memory has to come from the timelines.
    costs = CostModel(cluster, workload_of(plan), profile)
    placement = placement_of(plan, cluster)
    has_chunks = any(stage.chunks for replica in plan.replicas for stage in replica.stages)
    run = _simulated(plan, costs) if has_chunks else None
    cost = plan_cost(plan, costs, placement, run=run)
    # Price the placement, with the bound if it is asked for.
    estimates = estimates_of(
        costs,
        placement,
        cost,
        in_parts=_has_parts(plan),
        is_stock=sends_as_stock(plan),
        prove=thorough_bound if bounded else None,
    )
    # A placement counts whole micro-batches; with chunks the timelines know better.
    return estimates if run is None else _with_chunks_kept(estimates, run.timelines)


def _with_chunks_kept(estimates: Estimates, stages: Sequence[StageTimeline]) -> Estimates:
    """Correct the memory of stages in chunks: they keep parts of micro-batches, a placement counts
    whole ones."""
    # Only activations differ: the peak of the timeline replaces that of whole micro-batches.
    devices = dict(estimates.devices)
    for stage in stages:
        for name, peak_bytes in zip(stage.devices, stage.device_peak_bytes, strict=True):
            whole = devices[name]
            activations = whole.parts_bytes["activations"] + peak_bytes - whole.peak_bytes
            parts = {**whole.parts_bytes, "activations": activations}
            devices[name] = replace(whole, peak_bytes=peak_bytes, parts_bytes=parts)
    return replace(estimates, devices=devices)


def plan_cost(
    plan: Plan,
    costs: CostModel,
    placement: Placement,
    priced: PlacementCost | None = None,
    run: StepSimulation | None = None,
) -> PlacementCost:
    """Price a plan's placement; simulate pipelines with chunks or orders, and those of stock
    Megatron.

    Args:
        plan: its schedules and hosts decide what is simulated.
        costs: the price list of its workload on its cluster.
        placement: the plan's.
        priced: the price by `costs` alone, if that is known.
        run: the simulated step, if that is known.
    """
    if placement.dispatcher is not None:
        costs = costs.dispatched(placement.dispatcher)
    # The cost model's closed form holds for plain 1F1B; only shared paths need a simulation there.
    stock, cost = sends_as_stock(plan, costs.workload), priced or costs.placement(placement)
    if not (has_orders(plan) or (stock and _is_small(placement))):
        cost = queued(costs, placement, cost, is_stock=stock)
        return _with_stock_exchange(plan, costs, cost) if stock else cost
    # Every stage ends where its simulated timeline does.
    run = run or _simulated(plan, costs)
    replicas = tuple(
        replace(replica, pipeline_s=max(ends_s), ends_s=ends_s)
        for replica, stages in zip(cost.replicas, run.stages, strict=True)
        for ends_s in [tuple(stage.compute_end_s for stage in stages)]
    )
    # Combine the replicas with updates and exchanges as the cost model prices them.
    sharded = costs.sharded_as(placement)
    found = sharded.combine(placement, replicas, sharded.vocab_rows(placement.widths))
    if not (stock or costs.workload.training.hides_gathers):
        return found
    # Stock Megatron's exchange of gradients is another than the plug-in's, and simulated pipelines
    # have waited for new weights already.
    sync_s = run.step_time_s - found.pipelines_s - found.update_s
    return replace(found, gradient_sync_s=max(sync_s, 0.0))


def _simulated(plan: Plan, costs: CostModel) -> StepSimulation:
    # Other prices than the project's own say nothing of a simulated step.
    known = costs if type(costs) is CostModel else None
    return simulate_plan(plan, costs.cluster, costs.workload, costs.profile, costs=known)


def _with_stock_exchange(plan: Plan, costs: CostModel, cost: PlacementCost) -> PlacementCost:
    """Return the cost of a long step with stock Megatron's exchange of gradients and new weights.

    Both are around the first and the last passes, so a step of one micro-batch has all of them.
    """
    short = replace(plan, replicas=tuple(replace(r, num_micro_batches=1) for r in plan.replicas))
    run, alone = _simulated(short, costs), None
    if costs.workload.training.hides_gathers:
        # The passes of the short step have waited for new weights already; those priced have not.
        alone = _simulated(short, _without_hidden_gathers(costs))
    sync_s = run.step_time_s - (alone or run).pipelines_s - cost.update_s
    return replace(cost, gradient_sync_s=max(sync_s, 0.0))


def _without_hidden_gathers(costs: CostModel) -> CostModel:
    """Return the prices of the same job with new weights that are waited for after the update."""
    training = replace(costs.workload.training, overlap_param_gather=False)
    workload = replace(costs.workload, training=training)
    return CostModel(costs.cluster, workload, costs.profile)


def _is_small(placement: Placement) -> bool:
    """Return whether a step of stock Megatron is simulated whole."""
    return num_messages(placement, range(len(placement.replicas))) <= _MAX_STOCK_MESSAGES


def _has_parts(plan: Plan) -> bool:
    """Return whether a stage has several chunks or split backward passes."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    return any(stage.chunks or "W" in (stage.order or "") for stage in stages)


def has_orders(plan: Plan) -> bool:
    """Return whether any stage has several chunks, or an order unlike 1F1B's."""
    stages = [stage for replica in plan.replicas for stage in replica.stages]
    return any(stage.chunks or stage.order is not None for stage in stages)
