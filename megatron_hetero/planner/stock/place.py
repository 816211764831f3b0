"""A stage of a replica in a stock case: times and memory as straight lines over the layers."""

from __future__ import annotations

from dataclasses import dataclass
from sys import maxsize

from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.work.compute import PassTimes

NEVER = maxsize
"""So many layers to recompute stand for: it does not fit."""


@dataclass(frozen=True)
class StockPlace:
    """A stage of a replica, as straight lines over the layers."""

    times: tuple[PassTimes, PassTimes]
    """Without layers, and what each adds."""
    recomputed_s: float
    """Seconds added to a backward pass by each recomputed layer."""
    update_s: tuple[float, float]
    memory: StageMemory
    recomputed: StageMemory | None
    """With all layers recomputed; None where none may be."""

    def total_s(self, num_layers: int) -> float:
        """Forward and backward of one micro-batch without recompute by blocks."""
        base, each = self.times
        return base.total_s + num_layers * each.total_s

    def least_recomputed(self, num_layers: int) -> int:
        """Return layers that must be recomputed for the stage to fit; `NEVER` where it does not."""
        if self.memory.peak_bytes(num_layers) <= self.memory.capacity_bytes:
            return 0
        if (
            # Nothing may be recomputed, or the update alone is too large.
            self.recomputed is None
            or self.memory.updating_bytes(num_layers) > self.memory.capacity_bytes
        ):
            return NEVER
        part = "activations"
        # Bytes that a recomputed layer saves.
        saved = self.memory.per_layer[part] - self.recomputed.per_layer[part]
        missing = (
            self.recomputed.base_bytes
            + num_layers * self.memory.bytes_per_layer
            - self.memory.capacity_bytes
        )
        least = max(1, -(-missing // saved)) if saved > 0 else NEVER
        return least if least <= num_layers else NEVER
