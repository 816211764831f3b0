"""What the prices of all referees have in common: one vocabulary, and nothing but the job's own
recompute, micro-batch size and equal shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, Placement
from megatron_hetero.cost.sync.least import NO_SYNC, LeastSync
from megatron_hetero.errors import UnsupportedError


class RefereeCosts(CostModel):
    """Base of the referees' prices."""

    has_variants: ClassVar[bool] = False

    def vocab_rows(self, widths: Sequence[int]) -> int:
        """Not padded: the referees know one vocabulary."""
        return self.workload.model.vocab_size

    def least_sync(self, node: Node, width: int, num_replicas: int) -> LeastSync:
        """Nothing: the referees' exchanges are not those that the project's own model bounds."""
        return NO_SYNC

    def stage_memories(
        self, replica: PlacedReplica, index: int, rows: int, *, of_ends: bool = False
    ) -> tuple[StageMemory, ...]:
        """See `CostModel.stage_memories`; a micro-batch in flight for each stage from this on.

        `of_ends` changes nothing: the referees know no chunks.
        """
        stage, last = replica.stages[index], len(replica.stages) - 1
        ends, in_flight = (index == 0, index == last), last + 1 - index
        nodes = [self.cluster.node_by_name[device.node] for device in stage.devices]
        return tuple(self.memory(node, stage.width, *ends, in_flight, rows) for node in nodes)


def check_expressible(placement: Placement, across_machines: bool = False) -> None:
    """Refuse what no referee has a word for.

    Raises:
        UnsupportedError: names the replica, the stage and what it asks for.
    """
    for r, replica in enumerate(placement.replicas):
        if replica.micro_batch_size is not None:
            raise UnsupportedError(
                f"replica {r}: the referee has one micro-batch size for all replicas "
                f"(found one of its own, {replica.micro_batch_size})"
            )
        for s, stage in enumerate(replica.stages):
            for feature, value in (
                ("unequal shares", stage.shares),
                ("recompute", stage.recompute),
            ):
                if value is not None:
                    raise UnsupportedError(
                        f"replica {r}, stage {s}: the referee cannot express {feature} of one "
                        f"stage (found {value})"
                    )
            if not across_machines and len({device.node for device in stage.devices}) > 1:
                raise UnsupportedError(
                    f"replica {r}, stage {s}: the referee has no tensor-parallel group over "
                    "several machines"
                )
