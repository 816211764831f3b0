"""Counts what one rank's gradient sync hands to the transport, against the least that it could."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass
class Traffic:
    """Of one rank.  `bound_bytes`, per step: its gradients that other ranks hold too, each once.

    The rest are totals over `num_steps` steps: collectives of gradients, the bytes of the buffers
    handed to them, how many of these bytes were copied into such a buffer first, and the bytes of
    weights that a divided optimizer gave back to their holders.
    """

    bound_bytes: int
    num_steps: int = 0
    num_collectives: int = 0
    payload_bytes: int = 0
    packed_bytes: int = 0
    gathered_bytes: int = 0

    def count_reduced(self, buffer: torch.Tensor, packed: bool) -> None:
        self.num_collectives += 1
        self.payload_bytes += buffer.nbytes
        self.packed_bytes += buffer.nbytes if packed else 0

    def count_gathered(self, buffer: torch.Tensor) -> None:
        self.gathered_bytes += buffer.nbytes

    @property
    def ratio(self) -> float:
        """Payload over bound; 1.0 where nothing has to be sent and nothing is."""
        bound = self.bound_bytes * self.num_steps
        if bound == 0:
            return 1.0 if self.payload_bytes == 0 else float("inf")
        return self.payload_bytes / bound
