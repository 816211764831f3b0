"""Bytes of gradients and activations sent by a rank, beside the least possible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class RankTraffic:
    """Gradient traffic of one rank.

    `bound_bytes`, per step, counts its gradients that other ranks hold too, each once. The rest are
    totals over `num_steps` steps: collectives of gradients, the bytes of the buffers handed to
    them, the part of these bytes that was copied into such a buffer first, and the bytes of weights
    that a divided optimizer sent back to their holders. `sharded_bytes` are those of sharded
    layers, weights gathered and gradients sent to owners for each pass; the others leave them out.
    """

    bound_bytes: int
    num_steps: int = 0
    num_collectives: int = 0
    payload_bytes: int = 0
    packed_bytes: int = 0
    gathered_bytes: int = 0
    sharded_bytes: int = 0

    def count_reduced(self, buffer: torch.Tensor, packed: bool) -> None:
        self.num_collectives += 1
        self.payload_bytes += buffer.nbytes
        self.packed_bytes += buffer.nbytes if packed else 0

    def count_gathered(self, buffer: torch.Tensor) -> None:
        self.gathered_bytes += buffer.nbytes

    def count_sharded(self, buffer: torch.Tensor) -> None:
        self.sharded_bytes += buffer.nbytes

    @property
    def ratio(self) -> float:
        """Return payload over bound; 1.0 if nothing has to be sent and nothing is."""
        bound = self.bound_bytes * self.num_steps
        if bound == 0:
            return 1.0 if self.payload_bytes == 0 else float("inf")
        return self.payload_bytes / bound


@dataclass
class BoundaryTraffic:
    """Traffic sent by a rank at a boundary, in totals over the run.

    `tensor_bytes` counts the whole tensors, which all ranks of the stage send together.
    """

    num_messages: int = 0
    handed_bytes: int = 0
    tensor_bytes: int = 0

    def count(self, pieces: Sequence[torch.Tensor], tensor_bytes: int) -> None:
        self.num_messages += 1
        self.handed_bytes += sum(piece.nbytes for piece in pieces)
        self.tensor_bytes += tensor_bytes
