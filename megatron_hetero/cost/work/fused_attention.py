"""The part of large products that kernels of fused attention reach, by head size and sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT = "default"
"""Key of what GPUs without a table of their own reach."""


@dataclass(frozen=True)
class AttentionEfficiency:
    """Parts of the rate of large products that fused attention reaches in either pass."""

    forward: float
    backward: float


@dataclass(frozen=True)
class FusedAttention:
    """What kernels of causal fused attention reach.

    `by_type`: on long sequences, by GPU type and head size; `extra_tokens`: what a kernel computes
    besides, by pass, as if every sequence were so many tokens longer: blocks that the diagonal
    cuts, and the beginning and the end, when few blocks are left for many multiprocessors;
    `call_s`: fixed seconds of a call, by pass.
    """

    by_type: Mapping[str, Mapping[int, AttentionEfficiency]]
    extra_tokens: Mapping[str, float]
    call_s: Mapping[str, float]

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> FusedAttention:
        """Read the part of `calibration.json` that is called `attention`."""
        return cls(
            {
                gpu: {
                    int(size): AttentionEfficiency(part["forward"], part["backward"])
                    for size, part in by_size.items()
                }
                for gpu, by_size in data["part_of_products"].items()
            },
            dict(data["extra_tokens"]),
            dict(data["call_s"]),
        )

    def reached(self, gpu: str, head_size: int, seq_length: int) -> AttentionEfficiency:
        """Return the efficiency of a GPU type on sequences of some length, with the table's nearest
        head size, or the medians' for a type without a table."""
        # Head sizes are compared by their ratio.
        by_size = self.by_type.get(gpu, self.by_type[DEFAULT])
        part = by_size[min(by_size, key=lambda size: abs(math.log(size / head_size)))]
        # A short sequence computes relatively more of what a kernel does besides.
        return AttentionEfficiency(
            part.forward / (1 + self.extra_tokens["forward"] / seq_length),
            part.backward / (1 + self.extra_tokens["backward"] / seq_length),
        )
