"""Invariants of sharded layers: all ranks that have a part of a layer gather it together.

All holders of a layer gather it together, before each of its passes. So all of them have to come to
the same passes in the same order: replicas with the same layers in every stage, and, in pipelines,
with the same order of passes. Replicas of a single stage may differ in their number of
micro-batches: those with fewer give their parts for the rest of the step too.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_hetero.plan.checks.violation import Violation, stage_key, stage_name, stages
from megatron_hetero.plan.in_flight import num_in_flight
from megatron_hetero.plan.plan import Plan

FIELD = ("shape", "num_sharded_layers")


def sharded_layers_are_the_stages_own(plan: Plan) -> Iterator[Violation]:
    """Find stages with more sharded layers than layers, or with a negative number."""
    for r, s, stage in stages(plan):
        sharded, num_layers = stage.shape.num_sharded_layers, stage.shape.num_layers
        if not 0 <= sharded <= num_layers:
            yield Violation(
                stage_key(r, s, *FIELD),
                f"{stage_name(r, s)}: num_sharded_layers is {sharded}; allowed is 0 to the "
                f"stage's {num_layers} layers.",
            )


def sharded_layers_have_holders(plan: Plan) -> Iterator[Violation]:
    """Find sharded layers that not all replicas hold and shard alike."""
    if not plan.layout.has_sharded_layers:
        return
    for r, s, stage in stages(plan):
        if stage.shape.context_parallel > 1:
            yield Violation(
                stage_key(r, s, "shape", "context_parallel"),
                f"{stage_name(r, s)}: context parallelism (cp) and sharded layers (z) do not go "
                "together yet. Leave one of them out.",
            )
    # Parts are kept by replicas, so there have to be two at least.
    if len(plan.replicas) < 2:
        yield Violation(
            stage_key(0, 0, *FIELD),
            "replica 0 shards layers (z), and there is no other replica to keep the other parts. "
            "Leave z out, or use two replicas or more.",
        )
        return
    # [stage] -> (layers, sharded layers); every replica must have the same.
    first = [(s.shape.num_layers, s.shape.num_sharded_layers) for s in plan.replicas[0].stages]
    for r, replica in enumerate(plan.replicas):
        own = [(s.shape.num_layers, s.shape.num_sharded_layers) for s in replica.stages]
        if own != first:
            yield Violation(
                ("replicas", r, "stages"),
                f"replica {r} has stages of {_counts(own)} layers, replica 0 of {_counts(first)}. "
                "A sharded layer (z) is gathered by all replicas together: give all of them the "
                "same layers in every stage, and the same number of sharded ones.",
            )


def sharded_layers_are_passed_alike(plan: Plan) -> Iterator[Violation]:
    """Find pipelines whose replicas reach the sharded layers in different orders."""
    if not plan.layout.has_sharded_layers:
        return
    for r, s, stage in stages(plan):
        if stage.order is not None or stage.chunks:
            field = "chunks" if stage.chunks else "order"
            yield Violation(
                stage_key(r, s, field),
                f"{stage_name(r, s)}: an order of its own and sharded layers (z) do not go "
                "together yet. Leave one of them out.",
            )
    if plan.exchange_groups:
        yield Violation(
            ("exchange_groups",),
            "exchange_groups and sharded layers (z) do not go together yet. Leave one of them out.",
        )
    # With one stage, passes follow each other alike whatever the number of micro-batches.
    if len(plan.replicas[0].stages) == 1:
        return
    depth = range(len(plan.replicas[0].stages))
    # Collectives that gather a layer meet only if all replicas come to them in the same order.
    first = [num_in_flight(plan, 0, s) for s in depth]
    for r, replica in enumerate(plan.replicas):
        if replica.num_micro_batches != plan.replicas[0].num_micro_batches:
            yield Violation(
                ("replicas", r, "num_micro_batches"),
                f"replica {r} has {replica.num_micro_batches} micro-batches, replica 0 "
                f"{plan.replicas[0].num_micro_batches}. Pipelines with sharded layers (z) need as "
                "many in every replica; their sizes may differ (@COUNTxSIZE), and so may the "
                "numbers of replicas of one stage.",
            )
        elif [num_in_flight(plan, r, s) for s in depth] != first:
            yield Violation(
                stage_key(r, 0, "num_launched_forwards"),
                f"replica {r} has other launch counts than replica 0. Pipelines with sharded "
                "layers (z) need the same in every replica.",
            )


def sharded_layers_fit_the_training(plan: Plan) -> Iterator[Violation]:
    """Find sharded layers in models and trainings that do not support sharded layers."""
    if not plan.layout.has_sharded_layers or plan.workload is None:
        return
    key = stage_key(0, 0, *FIELD)
    if not plan.workload.training.use_distributed_optimizer:
        yield Violation(
            key,
            "the plan has sharded layers (z), whose optimizer's state is divided too, but the "
            "job has no --use-distributed-optimizer. Add the flag, or leave z out.",
        )
    if plan.workload.model.num_experts:
        yield Violation(
            key,
            "sharded layers (z) and experts (--num-experts) do not go together yet. Leave z out.",
        )


def _counts(stages_of: list[tuple[int, int]]) -> str:
    return ", ".join(f"{num}z{sharded}" if sharded else str(num) for num, sharded in stages_of)


INVARIANTS = (
    sharded_layers_are_the_stages_own,
    sharded_layers_have_holders,
    sharded_layers_are_passed_alike,
    sharded_layers_fit_the_training,
)
