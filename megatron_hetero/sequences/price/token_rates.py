"""Time and memory of a GPU for the tokens of a sequence, from catalogue and profile.

The model of a training step (`cost.work`, `cost.memory`) is asked at a few lengths.  What grows
with the length is work of tokens, what grows with its square is attention, the rest is paid once
for a forward and backward.  The seconds of products are no straight line of the tokens (clocks fall
in long products), so the three rates are the ones nearest to all lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.cost.memory.device import stage_memory
from megatron_hetero.cost.memory.libraries import KeptFree
from megatron_hetero.cost.memory.states import StateHolders
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.work.compute import group_layer_times
from megatron_hetero.cost.work.ends import embedding_times, head_times
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.cost.work.pieces import price_pieces
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import FusedScores

ASKED_LENGTHS = (512, 2048, 8192, 32_768, 131_072)
"""Lengths at which models of a whole step are asked."""
LEAST_TOKEN_S = 1e-12
"""Seconds of a token at least: where a model is so small that a pass lasts as long as its launches,
whatever its tokens, they are still shared out."""
_NO_LINK = Link(1e18, 0.0)


@dataclass(frozen=True)
class TokenRates:
    """A GPU with the whole model.

    A sequence of S tokens of which n are its own takes `token_s` for each of these and `pair_s` for
    each pair of a query and a key that it computes; `token_bytes`, and `pair_bytes` n S.
    `room_bytes` is left beside weights, gradients and optimizer.  `is_fused`: attention skips what
    its mask hides and can go round in a ring.
    """

    gpu_name: str
    token_s: float
    pair_s: float
    fixed_s: float
    token_bytes: float
    pair_bytes: float
    room_bytes: float
    is_fused: bool
    is_measured: bool


def token_rates(
    workload: Workload,
    gpu: GpuType,
    num_ranks: int,
    kept_free: KeptFree,
    profile: Profile | None = None,
) -> TokenRates:
    """Price tokens on a GPU.

    Args:
        workload: its sequence length and micro-batch size do not matter.
        gpu: the type.
        num_ranks: of the job, which divide the states of a distributed optimizer.
        kept_free: memory that holds no tensors of Megatron's.
        profile: measured times; they stretch or shrink all modelled ones alike.
    """
    ratio, is_measured = _measured_ratio(workload, gpu, profile)
    seconds = [_seconds(workload, gpu, length) for length in ASKED_LENGTHS]
    fixed_s, token_s, square_s = by_length(seconds)
    held = [_bytes(workload, gpu, length, num_ranks, kept_free) for length in ASKED_LENGTHS]
    fixed_bytes, token_bytes, pair_bytes = by_length(held)
    return TokenRates(
        gpu.name,
        max(LEAST_TOKEN_S, ratio * token_s),
        # A causal sequence has half of its square of pairs.
        max(0.0, ratio * 2 * square_s),
        ratio * fixed_s,
        token_bytes,
        max(pair_bytes, 0.0),
        gpu.memory_bytes - fixed_bytes,
        uses_flash_attention(workload.model, workload.training, gpu),
        is_measured,
    )


def by_length(found: Sequence[float]) -> tuple[float, float, float]:
    """Return the fixed part of a figure at `ASKED_LENGTHS`, the part per token, and the part per
    square of the length: the least squares of the relative errors."""
    # A figure of nothing, as the hop behind a last stage, has no relative errors.
    if not any(found):
        return 0.0, 0.0, 0.0
    lengths = np.array(ASKED_LENGTHS, dtype=float)
    # In units of the longest length: columns of like size keep the least squares exact.
    unit = float(lengths[-1])
    powers = (lengths[:, None] / unit) ** np.arange(3)
    figures = np.array(found, dtype=float)[:, None]
    # Rows divided by their figures: each error counts relative to the figure.
    parts, *_ = np.linalg.lstsq(powers / figures, np.ones(len(found)), rcond=None)
    fixed, of_token, of_square = (float(part) for part in parts)
    return fixed, of_token / unit, of_square / unit**2


def at_length(workload: Workload, length: int) -> Workload:
    """Return the job with sequences of `length` tokens, one at a time, computed as in
    `runtime.sequences.attention`."""
    model, training = workload.model, workload.training
    # Dropout of attention and a learned offset of the softmax need stored scores.
    stores = training.attention_dropout or model.learns_softmax_offset
    fused: FusedScores = "nowhere" if stores else "everywhere"
    return replace(
        workload,
        model=replace(model, seq_length=length),
        training=replace(training, micro_batch_size=1, fused_scores=fused),
    )


@lru_cache(maxsize=256)
def _seconds_of(workload: Workload, gpu: _Hashed, length: int) -> float:
    """Time the whole model forward and backward."""
    job, model = at_length(workload, length), workload.model
    member = (gpu.gpu, even_share(model, 1))
    layer = group_layer_times(job, (member,)).total_s
    rows = padded_vocab_size(model)
    ends = (
        embedding_times(job, gpu.gpu, 1, rows).total_s + head_times(job, gpu.gpu, 1, rows).total_s
    )
    return model.num_layers * layer + ends


@dataclass(frozen=True)
class _Hashed:
    """A type of GPU as a key: its peaks are a mapping."""

    gpu: GpuType

    def __hash__(self) -> int:
        return hash(self.gpu.name)


def _seconds(workload: Workload, gpu: GpuType, length: int) -> float:
    return _seconds_of(workload, _Hashed(gpu), length)


def _bytes(
    workload: Workload, gpu: GpuType, length: int, num_ranks: int, kept_free: KeptFree
) -> float:
    """Count the bytes on the GPU with one sequence of a length."""
    model = workload.model
    divided = num_ranks if workload.training.use_distributed_optimizer else 1
    memory = stage_memory(
        at_length(workload, length),
        gpu,
        even_share(model, 1),
        first=True,
        last=True,
        num_in_flight=1,
        vocab_rows=padded_vocab_size(model),
        kept_free=kept_free,
        holders=StateHolders(divided, divided),
    )
    return float(memory.training_bytes(model.num_layers))


def _measured_ratio(
    workload: Workload, gpu: GpuType, profile: Profile | None
) -> tuple[float, bool]:
    """Return measured over modelled seconds of the whole model, at the length of the profile."""
    if profile is None:
        return 1.0, False
    members = [(gpu, even_share(workload.model, 1))]
    rows = padded_vocab_size(workload.model)
    count = workload.model.num_layers
    # The same pieces twice, with the profile and without it, on a GPU without neighbours.
    found = price_pieces(workload, profile, members, _NO_LINK, rows)
    modelled = price_pieces(workload, None, members, _NO_LINK, rows)
    measured_s = found.stage(count, True, True).total_s
    return measured_s / modelled.stage(count, True, True).total_s, found.measured
