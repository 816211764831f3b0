"""What a plan's sharded layers cost and save."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Placement


@dataclass(frozen=True)
class ShardedStage:
    """Sharded layers of one stage, in all replicas.

    `exchange_s` is what their exchanges add to a step. `saved_bytes` is the least that a GPU of the
    stage is spared, `missing_bytes` the most that one would lack with whole layers (0 or less where
    they would fit).
    """

    stage: int
    num_sharded: int
    num_layers: int
    exchange_s: float
    saved_bytes: int
    missing_bytes: int


def sharded_stages(costs: CostModel, placement: Placement) -> Iterator[ShardedStage]:
    """Yield the stages of a placement that have sharded layers."""
    costs = costs.sharded_as(placement)
    rows = costs.vocab_rows(placement.widths)
    first = placement.replicas[0]
    # Layers are sharded in all replicas alike: the first one names the stages.
    for s, stage in enumerate(first.stages):
        if stage.sharding is None:
            continue
        saved, missing, passes = [], [], []
        for replica in placement.replicas:
            pairs = zip(
                costs.stage_memories(replica.without_sharding, s, rows),
                costs.stage_memories(replica, s, rows),
                strict=True,
            )
            passes.append(costs.stage(replica.without_sharding, s, rows).times)
            for whole, sharded in pairs:
                peak = whole.peak_bytes(stage.num_layers)
                saved.append(peak - sharded.peak_bytes(stage.num_layers))
                missing.append(peak - whole.capacity_bytes)
        # Without exchanges the slowest replica sets the pace, pass by pass.
        whole_s = max(t.forward_s for t in passes) + max(t.backward_s for t in passes)
        exchange_s = costs.stage(first, s, rows).times.total_s - whole_s
        yield ShardedStage(
            s,
            stage.num_sharded_layers,
            stage.num_layers,
            # An exchange happens in each round of micro-batches that replicas do together.
            first.num_rounds * exchange_s,
            min(saved),
            max(missing),
        )
