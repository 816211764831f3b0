"""A plan's placement, and what all of its replicas share: experts, sharded layers, states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.placement import (
    PlacedExperts,
    PlacedReplica,
    PlacedStage,
    Placement,
    Sharding,
    StateParts,
)
from megatron_hetero.errors import PlanFormatError, UnsupportedError
from megatron_hetero.plan.in_flight import num_in_flight
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.plan.sharding.expert_groups import (
    alike_peers,
    expert_peers,
    stages_in_group,
)


def placement_of(plan: Plan, cluster: Cluster) -> Placement:
    """Read the placement out of a validated plan.

    Raises:
        PlanFormatError: the plan names no devices, or one that the cluster lacks.
        UnsupportedError: the plan asks for what the cost model cannot price yet.
    """
    # Devices by the name that plan files use, `machine:index`.
    known = {device.name: device for device in cluster.devices}
    replicas = []
    # Stage by stage: known devices that can compute in the stage's precision.
    for r, replica in enumerate(plan.replicas):
        stages = []
        for s, stage in enumerate(replica.stages):
            where = f"replica {r}, stage {s}"
            # A plan may be a layout without devices: such a plan has no links and no GPUs to price.
            if not stage.devices:
                raise PlanFormatError(f"{where} names no devices, so its time cannot be predicted")
            missing = [name for name in stage.devices if name not in known]
            if missing:
                raise PlanFormatError(f"{where} uses {missing[0]}, which the cluster does not have")
            _require_precision(stage, [cluster.gpu_type(known[d]) for d in stage.devices], where)
            stages.append(
                PlacedStage(
                    tuple(known[name] for name in stage.devices),
                    stage.shape.num_layers,
                    stage.shape.shares,
                    stage.recompute,
                    stage.recompute_num_layers,
                    context_parallel=stage.shape.context_parallel,
                    expert_shares=stage.shape.expert_shares,
                    precision=stage.precision,
                    context_shares=stage.shape.uneven_context_shares,
                )
            )
        placed = PlacedReplica(
            tuple(stages), replica.num_micro_batches, micro_batch_size=replica.micro_batch_size
        )
        # Launch counts only where they are not 1F1B's own, since those are priced faster.
        counts = tuple(num_in_flight(plan, r, s) for s in range(len(stages)))
        if counts != placed.num_in_flight:
            placed = replace(placed, launch_counts=counts)
        replicas.append(placed)
    # What depends on all replicas together: owners of states, experts, sharded layers.
    placement = Placement(tuple(replicas), plan.exchange_groups, plan.exchange_uplinks)
    # Experts over replicas: the plan names the replicas that form groups together.
    if plan.layout.has_expert_groups:
        sizes = [[stage.shape.expert_groups for stage in r.stages] for r in plan.replicas]
        placement = _with_experts(placement, expert_peers(plan), sizes)
    shares = [[stage.optimizer_share for stage in r.stages] for r in plan.replicas]
    # Parts of states are written out only where holders are not all alike: shares of their own,
    # several groups on a stage, or experts with other holders than the rest of a layer.
    if any(map(any, shares)) or placement.has_context_parallel or placement.mixes_expert_groups:
        placement = with_optimizer_shares(placement, shares)
    if plan.layout.has_sharded_layers:
        # The replicas of such a plan have the same layers in every stage, so replica 0 tells for
        # all.
        sharded = [stage.shape.num_sharded_layers for stage in plan.replicas[0].stages]
        return with_sharded_layers(placement, sharded)
    return placement


def copies_of_experts(stage: PlacedStage) -> float:
    """Count how often a stage holds every expert of its layers: a part of once where several
    replicas hold them together."""
    size, width = stage.expert_groups or (1, stage.width)
    return len(stage.devices) / (size * width)


def with_expert_groups(placement: Placement, sizes: tuple[int, int]) -> Placement:
    """Deal experts out over the ranks of each stage in all replicas, which are in the order of
    stock Megatron's data-parallel ranks.

    Args:
        sizes: as of `StageShape.expert_groups`.
    """
    replicas = placement.replicas
    # Replicas in one group of experts; 1 where a group fits on the GPUs of one stage.
    together = max(1, sizes[0] * sizes[1] // len(replicas[0].stages[0].devices))
    # Replica r belongs to the r // together-th run of `together` neighbouring replicas.
    peers = {
        (r, s): tuple(range(len(replicas)))[r // together * together :][:together]
        for r, replica in enumerate(replicas)
        for s in range(len(replica.stages))
    }
    return _with_experts(placement, peers, [[sizes] * len(r.stages) for r in replicas])


def with_alike_groups(
    placement: Placement, sizes: Sequence[Sequence[tuple[int, int] | None]]
) -> Placement | None:
    """Deal experts out over the ranks of alike stages, as a plan with these sizes does
    (`expert_peers`); None where a stage finds too few that are alike.

    Args:
        placement: whose stages have no such experts yet.
        sizes: as of `StageShape.expert_groups`, [replica][stage]; None is none.
    """
    # Number of stages that a group needs, by (replica, stage).
    wanted: dict[tuple[int, int], int] = {}
    stages = []
    for r, replica in enumerate(placement.replicas):
        for s, (stage, own) in enumerate(zip(replica.stages, sizes[r], strict=True)):
            if own is None:
                continue
            wanted[r, s] = stages_in_group(own, stage.shape.num_devices)
            # Ranks of one group meet in each exchange of tokens: only stages that do the same work
            # in the same order may share a group.
            in_step = (
                *(own, replace(stage.shape, expert_groups=None), replica.first_layers[s]),
                *(stage.recompute, stage.recompute_num_layers, stage.precision),
                replica.num_in_flight[s],
                *(replica.num_micro_batches, replica.micro_batch_size),
            )
            stages.append((r, s, wanted[r, s], in_step))
    peers = alike_peers(stages)
    # A group that stays open when all replicas are placed lacks some of the experts.
    if any(len(peers[stage]) != number for stage, number in wanted.items()):
        return None
    return _with_experts(placement, peers, sizes)


def _with_experts(
    placement: Placement,
    peers: Mapping[tuple[int, int], Sequence[int]],
    sizes: Sequence[Sequence[tuple[int, int] | None]],
) -> Placement:
    """Deal experts out over the ranks of stages of several replicas.

    Args:
        placement: without such experts.
        peers: (replica, stage) -> replicas whose ranks of the stage form groups together.
        sizes: `StageShape.expert_groups`, [replica][stage].
    """
    made = []
    for r, replica in enumerate(placement.replicas):
        stages = []
        for s, stage in enumerate(replica.stages):
            own = sizes[r][s]
            if own is not None:
                # Devices of the whole group, replica by replica, which is the order of the group's
                # ranks.
                others = [placement.replicas[peer].stages[s].devices for peer in peers[r, s]]
                devices = tuple(device for of_peer in others for device in of_peer)
                stage = replace(stage, experts=PlacedExperts(own, devices))
            stages.append(stage)
        made.append(replace(replica, stages=tuple(stages)))
    return replace(placement, replicas=tuple(made))


def with_sharded_layers(placement: Placement, counts: Sequence[int]) -> Placement:
    """Divide the weights of the first layers of each stage among the replicas, which have the same
    layers in every stage.

    Args:
        counts: such layers, [stage]; 0 is none.
    """
    # `Sharding.replicas` are plain, so that shardings never nest.
    plain = tuple(replica.without_sharding for replica in placement.replicas)
    shardings = [Sharding(count, plain) if count else None for count in counts]
    made = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, sharding=sharding)
                for stage, sharding in zip(replica.stages, shardings, strict=True)
            ),
        )
        for replica in plain
    )
    return replace(placement, replicas=made)


def _require_precision(stage: Stage, gpus: Sequence[GpuType], where: str) -> None:
    """Refuse a stage with a precision of its own that the GPUs lack."""
    if stage.precision is None:
        return
    for gpu in gpus:
        if gpu.peak_flops.get(stage.precision) is None:
            raise UnsupportedError(
                f"{where}: {gpu.name} cannot compute in {stage.precision}, the stage's precision. "
                "Correct it in the plan, or plan again."
            )


def with_optimizer_shares(
    placement: Placement, shares: Sequence[Sequence[int | None]]
) -> Placement:
    """Set how much of the optimizer's states each stage keeps beside the other holders.

    Each tensor-parallel group of a stage is a holder of its own.

    Args:
        shares: relative to each other, [replica][stage]; None is 1.
    """
    # Weights of each stage; a stage with context parallelism has several holders.
    replicas = placement.replicas
    weights = [[share or 1 for share in of_replica] for of_replica in shares]
    of_groups = [
        [own * stage.context_parallel for own, stage in zip(of_replica, r.stages, strict=True)]
        for of_replica, r in zip(weights, replicas, strict=True)
    ]
    # Sums over all holders: of a tied embedding, of both ends, and of each layer.
    # A set, because a pipeline of one stage holds both ends and counts once.
    ends = [{0, len(of_replica) - 1} for of_replica in weights]
    tied = sum(of_groups[r][s] for r, of_replica in enumerate(ends) for s in of_replica)
    embedding = sum(of_replica[0] for of_replica in of_groups)
    head = sum(of_replica[-1] for of_replica in of_groups)
    spans = [
        [
            range(first, first + stage.num_layers)
            for first, stage in zip(r.first_layers, r.stages, strict=True)
        ]
        for r in replicas
    ]
    # Sums of weights by layer, shape [layer]; `of_experts` counts the copies of its experts.
    of_layer = [0] * sum(stage.num_layers for stage in replicas[0].stages)
    of_experts = [0.0] * len(of_layer)
    for r, of_replica in enumerate(spans):
        for s, layers in enumerate(of_replica):
            for layer in layers:
                of_layer[layer] += of_groups[r][s]
                of_experts[layer] += weights[r][s] * copies_of_experts(replicas[r].stages[s])
    # A stage's part: its weight over the sum, as the mean over its layers.
    made = []
    for r, replica in enumerate(replicas):
        stages = []
        for s, stage in enumerate(replica.stages):
            own = weights[r][s]
            part = sum(own / of_layer[layer] for layer in spans[r][s]) / stage.num_layers
            parts: StateParts = (part, own / tied, own / embedding, own / head)
            if placement.mixes_expert_groups:
                of_own_experts = sum(own / of_experts[layer] for layer in spans[r][s])
                parts = (*parts, of_own_experts / stage.num_layers)
            stages.append(replace(stage, state_parts=parts, optimizer_share=shares[r][s]))
        made.append(replace(replica, stages=tuple(stages)))
    return replace(placement, replicas=tuple(made))
