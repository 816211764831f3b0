"""Causal attention of some rows of sequences by torch's fused kernels, which store no scores.

Own queries of a divided sequence are a few runs of consecutive positions.  The keys that a run sees
are all up to its last position, so each run is one call of `scaled_dot_product_attention` with the
causal mask aligned to the lower right corner (PyTorch: `torch.nn.attention.bias`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

Run = tuple[int, int]
"""First position, and the number of positions."""


def runs_of(positions: npt.NDArray[np.int64]) -> tuple[Run, ...]:
    """Divide positions into runs of consecutive positions, in order.

    >>> runs_of(np.array([0, 1, 2, 8, 9, 4]))
    ((0, 3), (8, 2), (4, 1))
    """
    if not len(positions):
        return ()
    starts = np.flatnonzero(np.append(True, np.diff(positions) != 1))
    counts = np.diff(np.append(starts, len(positions)))
    return tuple(zip(positions[starts].tolist(), counts.tolist(), strict=True))


def positions_of(runs: Sequence[Run], device: Any = None) -> Tensor:
    """Return all positions of runs."""
    ranges = (torch.arange(first, first + count, device=device) for first, count in runs)
    return torch.cat([torch.arange(0, device=device), *ranges])


def may_be_fused(config: Any) -> bool:
    """Tell if the kernels compute what the job asks for: a plain softmax, without dropout, of heads
    whose values are as wide as their keys; and if its flags leave the choice
    (`model.megatron_flags` says the same of a job's flags).

    Args:
        config: Megatron's of the model, or its arguments.
    """
    return bool(
        config.attention_dropout == 0
        and config.softmax_type == "vanilla"
        and not config.multi_latent_attention
        and config.attention_backend.name not in ("unfused", "local")
    )


def attend(query: Tensor, key: Tensor, value: Tensor, runs: Sequence[Run], scale: float) -> Tensor:
    """Compute attention of some queries of sequences.

    Args:
        query: shape `[rows, b, heads, d]`.
        key, value: of whole sequences, shape `[tokens, b, groups, d]`.
        runs: positions of the queries, in their order.
        scale: of the scores.
    Returns:
        Shape `[rows, b, heads * d]`.
    """
    # torch's kernels want heads before tokens.
    queries, keys, values = (part.permute(1, 2, 0, 3) for part in (query, key, value))
    num_calls = _num_calls(queries, keys, values)
    found, row = [], 0
    # One run of consecutive queries at a time: it sees all keys up to its end.
    for first, count in runs:
        stop = first + count
        mask = None
        # A run from the start is plainly causal; any other is causal from its lower right corner.
        if first:
            # The class of masks has no kernel on a CPU.
            mask = causal_lower_right(count, stop) if query.is_cuda else _mask(first, stop)
        # Some kernels know no grouped queries: then one call for each query of a group.
        parts = [
            scaled_dot_product_attention(
                queries[:, i::num_calls, row : row + count],
                keys[:, :, :stop],
                values[:, :, :stop],
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=query.size(2) != num_calls * key.size(2),
            )
            for i in range(num_calls)
        ]
        # Query i of every group was in call i.
        found.append(torch.stack(parts, dim=2).flatten(1, 2) if num_calls > 1 else parts[0])
        row += count
    return torch.cat([part.permute(2, 0, 1, 3) for part in found]).flatten(2)


def _num_calls(queries: Tensor, keys: Tensor, values: Tensor) -> int:
    """Return in how many calls grouped queries are computed: one for each query of a group on GPUs
    without flash attention, since the other fused kernel knows no groups."""
    times = queries.size(1) // keys.size(1)
    if times == 1 or not queries.is_cuda:
        return 1
    takes_groups = can_use_flash_attention(SDPAParams(queries, keys, values, None, 0.0, True, True))
    return 1 if takes_groups else times


def _mask(first: int, stop: int) -> Tensor:
    return torch.arange(stop) <= torch.arange(first, stop).unsqueeze(1)
