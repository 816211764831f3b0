"""Seconds of every stage of a plan, as the simulation and the rehearsal take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_hetero.bounds.estimate import workload_of
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.step_cost import ReplicaCost
from megatron_hetero.cost.sync.buckets import StageId
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.schedule.exchange.early import LastBackward
from megatron_hetero.schedule.exchange.first_use import ForwardLayers
from megatron_hetero.schedule.orders.chunk_times import stage_chunk_times
from megatron_hetero.schedule.parts import ChunkTimes


@dataclass(frozen=True)
class StageStepTimes:
    """Times of the GPUs of one stage: each chunk's passes, and the optimizer once a step.

    `last_backward` is that of a first stage.
    """

    chunks: tuple[ChunkTimes, ...]
    update_s: float
    last_backward: LastBackward | None


def plan_times(
    plan: Plan, cluster: Cluster, profile: Profile | None = None
) -> tuple[tuple[StageStepTimes, ...], ...]:
    """Time every stage, [replica][stage], by the cost model and the profile.

    Args:
        plan: validated, with a workload and devices of `cluster`.
        profile: measured times; None has the analytic model for all.
    Raises:
        UsageError, PlanFormatError, UnsupportedError: as `simulate_plan`.
    """
    # The cost model with the plan's sharded layers, and the vocabulary padded for all widths.
    placement = placement_of(plan, cluster)
    workload = workload_of(plan)
    costs = CostModel(cluster, workload, profile).sharded_as(placement)
    rows = costs.vocab_rows(placement.widths)
    found = []
    # Every stage: its chunks' passes, its update, and the first stage's last backward layer by
    # layer.
    for r, replica in enumerate(placement.replicas):
        cost = costs.replica(replica, rows)
        chunks = replica_chunk_times(plan, r, cost, workload)
        last_backward = last_backward_of(
            costs, replica, rows, plan.replicas[r].stages[0], chunks[0]
        )
        found.append(
            tuple(
                StageStepTimes(times, stage.update_s, None if s else last_backward)
                for s, (times, stage) in enumerate(zip(chunks, cost.stages, strict=True))
            )
        )
    return tuple(found)


def replica_chunk_times(
    plan: Plan, r: int, cost: ReplicaCost, workload: Workload
) -> tuple[tuple[ChunkTimes, ...], ...]:
    """Time the chunks of one replica, [stage][chunk]."""
    stages = plan.replicas[r].stages
    return tuple(
        stage_chunk_times(stage, priced.times, workload, is_last=s + 1 == len(stages))
        for s, (stage, priced) in enumerate(zip(stages, cost.stages, strict=True))
    )


def last_backward_of(
    costs: CostModel,
    replica: PlacedReplica,
    rows: int,
    stage: Stage,
    times: Sequence[ChunkTimes],
) -> LastBackward:
    """Time the last backward passes of a first stage, layer by layer.

    Args:
        costs: the price list, sharded as the placement.
        replica: the placed replica.
        rows: rows of the padded vocabulary.
        stage: the plan's; `times` are those of its chunks.
    """
    return LastBackward(_layers_of(costs, replica, rows, (0, stage), times, "backward"))


def forward_layers(
    plan: Plan,
    placement: Placement,
    costs: CostModel,
    rows: int,
    times: Sequence[Sequence[Sequence[ChunkTimes]]],
) -> dict[StageId, ForwardLayers]:
    """Time the forward passes of all stages, layer by layer, if new weights travel during the first
    ones; else return nothing.

    Args:
        placement: the plan's.
        costs: the price list, sharded as the placement.
        rows: rows of the padded vocabulary.
        times: of the chunks, [replica][stage][chunk].
    """
    if not costs.workload.training.hides_gathers:
        return {}
    return {
        (r, s): ForwardLayers(_layers_of(costs, placed, rows, (s, stage), own[s], "forward"))
        for r, (placed, made, own) in enumerate(
            zip(placement.replicas, plan.replicas, times, strict=True)
        )
        for s, stage in enumerate(made.stages)
    }


def _layers_of(
    costs: CostModel,
    replica: PlacedReplica,
    rows: int,
    at: tuple[int, Stage],
    times: Sequence[ChunkTimes],
    kind: Literal["forward", "backward"],
) -> tuple[tuple[int, int, float, float], ...]:
    """Return the chunks of a stage as `PassLayers.chunks`.

    Args:
        at: the stage's place in the replica, and the plan's stage.
    """
    # Seconds of the stage's pieces: embedding, layers, head.
    s, stage = at
    placed = replica.stages[s]
    own = costs.variant(
        micro_batch_size=replica.micro_batch_size, recompute=placed.recompute
    ).stage_pieces(placed, rows)

    def seconds(piece: PassTimes) -> float:
        return piece.forward_s if kind == "forward" else piece.backward_s

    # A backward pass leaves layer by layer, from the head's end down to the embedding.
    chunks = []
    for chunk, chunk_times in zip(stage_chunks(stage), times, strict=True):
        end = chunk.first_layer + chunk.num_layers
        before_s = seconds(own.embedding) if chunk.first_layer == 0 else 0.0
        behind_s = seconds(own.head) if end == costs.workload.model.num_layers else 0.0
        layers_s = chunk.num_layers * seconds(own.layer)
        # The chunk's time as it is simulated, in the proportions of its pieces.
        ratio = chunk_times.seconds(kind) / (before_s + layers_s + behind_s)
        chunks.append((chunk.first_layer, chunk.num_layers, ratio * layers_s, ratio * before_s))
    return tuple(chunks)
