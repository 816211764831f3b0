"""The plans for which the lower bound holds: the space that the search goes over."""

from __future__ import annotations

from megatron_hetero.bounds.chains.kinds import group_widths
from megatron_hetero.cost.choices import (
    context_parallels,
    deals_experts,
    may_choose,
    may_mix_sizes,
    micro_batch_sizes,
    recomputes,
    shares_tokens,
)
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement, own_launch_counts
from megatron_hetero.cost.share import equal_dealing
from megatron_hetero.cost.step_cost import PlacementCost
from megatron_hetero.cost.widths import usable_gpus


def relaxed(costs: CostModel) -> CostModel:
    """Return prices that no plan of the space is below, group by group: of the least layers, and of
    experts divided or dealt out, whichever is less."""
    least = costs.of_least_layers()
    return least.of_least_dealings() if deals_experts(costs) else least


def has_every_plan(costs: CostModel) -> bool:
    """Return whether the search makes no plan outside of the space: groups over several nodes
    are, where the limits allow them, and groups over the islands of a machine.  So are divided
    sequences, which it makes only where speed is all that counts (`Problem.divides_sequences`)."""
    may_share = may_choose(costs, "shares")
    cluster = costs.cluster
    keeps_to_nodes = "nodes" in cluster.limits.no_tensor_parallel_across
    has_islands = any(node.is_island for node in cluster.nodes)
    return not may_share or (keeps_to_nodes and not has_islands)


def why_outside(
    costs: CostModel,
    placement: Placement,
    cost: PlacementCost,
    *,
    free_groups: bool = False,
    divided: bool = False,
) -> str | None:
    """Return the reason why a placement is outside the space; None if the placement is inside.

    Args:
        free_groups: the space also has groups of any GPUs, in any shares, and divided sequences.
        divided: it also has stages whose groups divide sequences, each of which it has too.

    Every rule of `bounds.step_time` that leaves plans out has its line here.
    """
    # Memory, then the number of replicas.
    if cost.missing_bytes > 0:
        return "it does not fit"
    num_replicas, wanted = len(placement.replicas), costs.cluster.limits.num_replicas
    if wanted is not None and num_replicas != wanted:
        return f"it has {num_replicas} replicas, where limits.num_replicas is {wanted}"
    # Micro-batch sizes that plans may choose, and mix.
    allowed = micro_batch_sizes(costs, num_replicas)
    sizes = {
        replica.micro_batch_size or costs.workload.training.micro_batch_size
        for replica in placement.replicas
    }
    if not sizes <= set(allowed) or (len(sizes) > 1 and not may_mix_sizes(costs)):
        return f"micro-batches of {', '.join(map(str, sorted(sizes)))} sequences"
    # Then each replica by itself.
    for replica in placement.replicas:
        if reason := _why_replica_outside(costs, replica, free_groups, divided):
            return reason
    return None


def _why_replica_outside(
    costs: CostModel, replica: PlacedReplica, free_groups: bool, divided: bool
) -> str | None:
    # With fewer micro-batches than stages behind, 1F1B launches all of them and no more.
    least = [min(n, replica.num_micro_batches) for n in own_launch_counts(len(replica.stages))]
    if any(n < own for n, own in zip(replica.num_in_flight, least, strict=True)):
        return "a stage launches fewer forwards than 1F1B"
    for stage in replica.stages:
        if reason := _why_stage_outside(costs, stage, free_groups, divided):
            return reason
    return None


def _why_stage_outside(
    costs: CostModel, stage: PlacedStage, free_groups: bool, divided: bool
) -> str | None:
    size = stage.context_parallel
    if size > 1 and not (free_groups or divided):
        return "context parallelism"
    if stage.context_shares is not None:
        if not (free_groups and shares_tokens(costs)):
            return "unlike shares of sequences"
    elif size > 1 and size not in context_parallels(costs, stage.width, size):
        return f"context parallelism of size {size}"
    if stage.sharding is not None:
        return "sharded layers"
    if stage.experts is not None and not free_groups:
        return "experts dealt out over replicas"
    # Groups of any GPUs in any shares are part of the wider space.
    for group in () if free_groups else stage.groups:
        if reason := _why_group_outside(costs, group):
            return reason
    names = dict.fromkeys(device.node for device in stage.devices)
    nodes = [costs.cluster.node_by_name[name] for name in names]
    # Limits may keep some GPUs of a node idle, and the space has no plan on them.
    usable = {(node.name, index) for node in nodes for index in usable_gpus(costs.cluster, node)}
    for device in stage.devices:
        if device not in usable:
            return f"{device.name}, which the limits keep idle"
    # Recompute of some layers is in the space only where plans may choose recompute.
    own = costs.workload.training.recompute
    some = stage.recompute_num_layers is not None and not may_choose(costs, "recompute")
    if (stage.recompute or own) not in recomputes(costs) or some:
        return "recompute that is not the job's"
    if stage.optimizer_share is not None and not may_choose(costs, "optimizer_share"):
        return "optimizer shares that are not the job's"
    return None


def _why_group_outside(costs: CostModel, stage: PlacedStage) -> str | None:
    names = {device.node for device in stage.devices}
    table = stage.expert_shares
    if table is not None and not (
        deals_experts(costs)
        and stage.shares is None
        and len(set(table)) == 1
        and equal_dealing(costs.workload.model, stage.width) is not None
    ):
        return "experts dealt out unequally, or where the search may not"
    if len(names) > 1 or len(set(stage.shares or ())) > 1:
        return "a group of shares of unlike sizes, or over several nodes"
    node = costs.cluster.node_by_name[names.pop()]
    if stage.width not in group_widths(costs, node, uneven=stage.shares is not None):
        return f"a group of {stage.width} GPUs of {node.name}"
    return None
