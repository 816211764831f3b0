"""What a plan is predicted to take: `Estimates` of a Plan on a Cluster."""

from __future__ import annotations

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.bound import step_time_bound
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement, placement_of
from megatron_hetero.cost.price import price_of
from megatron_hetero.cost.profile import Profile
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.errors import UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.plan import DeviceEstimate, Estimates, Plan


def estimate_plan(plan: Plan, cluster: Cluster, profile: Profile | None = None) -> Estimates:
    """Predict time and memory of a validated plan; fits or not, the numbers say.

    Raises:
        UsageError: the plan carries no workload.
        PlanFormatError: it names no devices, or devices that the cluster lacks.
        UnsupportedError: it asks for something that cannot be priced yet (named).
    """
    costs = CostModel(cluster, workload_of(plan), profile)
    placement = placement_of(plan, cluster)
    return estimates_of(costs, placement, costs.placement(placement))


def workload_of(plan: Plan) -> Workload:
    """The model of a plan, and how it is trained.

    Raises:
        UsageError: the plan carries none.
    """
    if plan.workload is None:
        raise UsageError(
            "the plan carries no model, so its time cannot be predicted; "
            "make it with `megatron-hetero plan`, or give the model"
        )
    return plan.workload


def estimates_of(costs: CostModel, placement: Placement, cost: PlacementCost) -> Estimates:
    """The figures of an already priced placement in the form that plan.json holds."""
    workload = costs.workload
    price = price_of(costs, placement, cost)
    tokens = workload.training.global_batch_size * workload.model.seq_length
    # Beyond this step the plan is outside of the space anyway.
    bound = step_time_bound(costs, enough_s=1.01 * cost.step_time_s)
    # Groups of unequal shares are searched but not bounded; and a plan edited by hand may do what
    # the search does not, or not fit.
    has_shares = any(s.shares is not None for r in placement.replicas for s in r.stages)
    in_space = not has_shares and bound.step_time_s <= cost.step_time_s * (1 + 1e-9)
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
        bound_s=min(bound.step_time_s, cost.step_time_s) if in_space else None,
        gap=max(0.0, cost.step_time_s / bound.step_time_s - 1) if in_space else None,
        replica_times_s=tuple(r.pipeline_s for r in cost.replicas),
        stage_times_s=tuple(tuple(s.times.total_s for s in r.stages) for r in cost.replicas),
        boundary_times_s=tuple(tuple(h.total_s for h in r.forward_hops) for r in cost.replicas),
        gradient_sync_s=cost.gradient_sync_s,
        devices=devices,
        bound_relaxes=bound.relaxes if in_space else "",
        measured=cost.measured,
        price_per_hour=None if price is None else price.per_hour,
        price_per_million_tokens=(
            None if price is None else price.of_tokens(1e6, cost.step_time_s, tokens)
        ),
    )
