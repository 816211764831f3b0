"""Fused attention: which GPUs have a kernel, and the part of large products that it reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec

FLASH_CAPABILITY = 8.0
"""Compute capability from which there are fused kernels of attention."""
_WIDE_HEAD = 192
"""Channels of a head up to which every GPU with fused kernels has one for backward."""
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


def has_fused_attention(head: int, gpu: GpuType) -> bool:
    """Return whether a GPU has a fused kernel of attention for both passes, in half precision, for
    heads of up to `head` channels: from compute capability 8.0 on, for heads of more than
    `_WIDE_HEAD` only on 8.0 and from 9.0 on (`get_attention_backend`, Transformer Engine 2.20).
    GPUs without a compute capability (AMD) have one too.
    """
    if gpu.capability is None:
        return True
    is_small = 8.0 < gpu.capability < 9.0
    return gpu.capability >= FLASH_CAPABILITY and not (is_small and head > _WIDE_HEAD)


def uses_flash_attention(model: ModelSpec, training: TrainingSpec, gpu: GpuType) -> bool:
    """Return whether attention is fused: wanted by the job and possible on the GPU."""
    wanted = training.flash_attention and training.precision != "fp32"
    return wanted and has_fused_attention(max(model.head_sizes), gpu)
