"""What a plan's stages do with a layer, beside the programs that are synthesised for their GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.libraries import memory_kind
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import UsageError
from megatron_hetero.plan.plan import Plan
from tools.referees.hap.costed import LayerGroup
from tools.referees.hap.synthesise import (
    LayerOption,
    layer_options,
    placed_layer_s,
)


@dataclass(frozen=True)
class StagePrograms:
    """One stage of several GPUs, and the options for a layer on them.

    Attributes:
        replica, stage: the first of those that are alike.
        devices: its GPUs.
        shape: the stage as the layout has it.
        layer_s: seconds of a layer for one micro-batch as it is, nothing recomputed in full.
        options: as `layer_options` has them.
    """

    replica: int
    stage: int
    devices: tuple[str, ...]
    shape: str
    layer_s: float
    options: tuple[LayerOption, ...]


def plan_programs(
    plan: Plan, cluster: Cluster, profile: Profile | None = None
) -> tuple[StagePrograms, ...]:
    """Return the programs for every stage of several GPUs; stages that are alike once.

    Args:
        plan: with its model.
        cluster: its machines.
        profile: measurements to price by.
    Raises:
        UsageError: the plan carries no model.
        UnsupportedError: layers with experts or latent attention.
    """
    if plan.workload is None:
        raise UsageError("the plan carries no model, so its layers have no programs; plan anew")
    placement = placement_of(plan, cluster)
    costs = CostModel(cluster, plan.workload, profile).sharded_as(placement)
    rows = costs.vocab_rows(placement.widths)
    found: dict[object, StagePrograms] = {}
    for r, replica in enumerate(placement.replicas):
        for s, stage in enumerate(replica.stages):
            kinds = [memory_kind(cluster.node_by_name[device.node]) for device in stage.devices]
            ends = s == 0, s == len(replica.stages) - 1
            key = tuple(kinds), stage.shape, ends, replica.num_in_flight[s], replica.num_rounds
            if len(stage.devices) > 1 and key not in found:
                found[key] = _of_stage(costs, replica, r, s, rows)
    return tuple(found.values())


def _of_stage(costs: CostModel, replica: PlacedReplica, r: int, s: int, rows: int) -> StagePrograms:
    stage = replica.stages[s]
    memories = costs.stage_memories(replica.without_sharding, s, rows)
    costs = costs.variant(micro_batch_size=replica.micro_batch_size)
    place = LayerGroup(
        stage.devices,
        stage.num_layers,
        replica.num_in_flight[s],
        replica.num_rounds,
        tuple(float(memory.capacity_bytes - memory.base_bytes) for memory in memories),
    )
    return StagePrograms(
        r,
        s,
        tuple(device.name for device in stage.devices),
        str(stage.shape),
        placed_layer_s(costs, stage, place.num_micro_batches),
        layer_options(costs, place),
    )
