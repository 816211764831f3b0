"""A stage of a replica in a stock case: times and memory as straight lines over the layers."""

from __future__ import annotations

from functools import cached_property
from sys import maxsize

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.work.compute import PassTimes
from megatron_hetero.hashed import value

_SLACK_BYTES = 4096
NEVER = maxsize
"""So many layers to recompute stand for: it does not fit."""


@value(frozen=True)
class StageMemories:
    """The memory of a stage and the seconds of its update, as straight lines over the layers."""

    update_s: tuple[float, float]
    """Without layers, and what each adds."""
    memory: StageMemory
    recomputed: StageMemory | None
    """With all layers recomputed; None where none may be."""
    of_one: StageMemory
    """With a single micro-batch kept."""
    head_bytes: int
    """What a last stage keeps of a micro-batch's head; 0 on other stages."""
    model_layers: int
    """Layers of the model."""

    def holds(self, chunks: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return whether the stage fits while passes are computed, shape [division].

        Args:
            chunks: layers of each chunk, shape [division, chunk].
            kept: micro-batches that are kept of each chunk, shape [moment, chunk].
        """
        memory, part, num_layers = self.of_one, "activations", chunks.sum(axis=1)
        of_one = memory.base[part] + num_layers * memory.per_layer[part]
        always = memory.base_bytes + num_layers * memory.bytes_per_layer - of_one
        # A chunk has its layers' part; the head follows the last chunk alone.
        of_layer = (of_one - self.head_bytes) / np.maximum(num_layers, 1)
        of_chunks = chunks * of_layer[:, None]
        of_chunks[:, -1] += self.head_bytes
        # Bytes are whole numbers; a chunk's part of them is rounded down.
        most = memory.capacity_bytes + _SLACK_BYTES
        return np.asarray(always + (of_chunks @ kept.T).max(axis=1) <= most)

    @cached_property
    def least_recomputed(self) -> NDArray[np.int64]:
        """Return layers that must be recomputed for the stage to fit with each number of layers, up
        to all of the model's; `NEVER` where it does not."""
        layers = np.arange(self.model_layers + 1)
        found = np.where(layers <= self.memory.max_layers, 0, NEVER)
        if self.recomputed is None:
            return found
        part = "activations"
        # Bytes that a recomputed layer saves, and bytes beyond the capacity.
        saved = self.memory.per_layer[part] - self.recomputed.per_layer[part]
        if saved <= 0:
            return found
        missing = (
            self.recomputed.base_bytes
            + layers * self.memory.bytes_per_layer
            - self.memory.capacity_bytes
        )
        least = np.maximum(1, -(-missing // saved))
        # Recompute saves nothing of the update.
        base, each = self.memory.updating_line
        updates = base + layers * each <= self.memory.capacity_bytes
        return np.where((found > 0) & updates & (least <= layers), least, found)


@value(frozen=True)
class StockPlace:
    """A stage of a replica."""

    times: tuple[PassTimes, PassTimes]
    """Without layers, and what each adds."""
    recomputed_s: float
    """Seconds added to a backward pass by each recomputed layer."""
    memories: StageMemories

    def totals_s(self, num_recomputed: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return forward and backward of one micro-batch with 0, 1, 2 ... layers, shape [layers].

        Args:
            num_recomputed: of each number of layers, those recomputed by blocks.
        """
        base, each = self.times
        layers = np.arange(len(num_recomputed))
        return np.asarray(
            base.total_s + layers * each.total_s + num_recomputed * self.recomputed_s
        )
