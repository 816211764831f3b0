"""Layouts of fused attention: which places of a call's tensors belong to a sequence.

Dense: `sbhd` `[s, b, h, d]` and `bshd` `[b, s, h, d]`, where a padding mask may cut the rows short.
Packed: `thd` `[t, h, d]`, the sequences one behind another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_hetero.errors import UnsupportedError


class AttentionCall(NamedTuple):
    """Mask and layout of a call."""

    name: str
    """"sbhd", "bshd" or "thd"."""
    scale: float
    is_causal: bool
    is_padded: bool
    window: tuple[int, int]
    bottom_right: bool


def call_shape(
    layout: Any, scale: float, mask: Any, window: Any, bottom_right: bool, declined: Sequence[Any]
) -> AttentionCall:
    """Return the mask and layout of a call.

    Args:
        layout: one of Transformer Engine's, of queries, keys and values.
        scale: factor of the scores.
        mask: one of Transformer Engine's.
        window: numbers of keys in sight before and behind a query, -1 for no limit; None for none.
        bottom_right: the last query sees the last key.
        declined: whatever of it is true asks for what these kernels do not do.
    Raises:
        UnsupportedError: the call has no counterpart here.
    """
    # The first letters of a layout's name say in which order its axes are.
    names = {"SB": "sbhd", "BS": "bshd", "TH": "thd", "T3": "thd"}
    name = names.get(layout.name.removeprefix("NVTE_")[:2])
    if name is None or any(declined):
        raise UnsupportedError(
            f"Transformer Engine's fused attention of layout {layout.name}, with dropout, biases "
            "or fp8, has no counterpart on a CPU."
        )
    # -1: no limit on that side.
    left, right = window or (-1, -1)
    return AttentionCall(
        name,
        scale,
        "CAUSAL" in mask.name,
        "PADDING" in mask.name or name == "thd",
        (left, right),
        bool(bottom_right) or "BOTTOM_RIGHT" in mask.name,
    )


class AttendedPart(NamedTuple):
    """Queries with the keys in sight, as places in the tensors of a call."""

    queries: tuple[Any, ...]
    keys: tuple[Any, ...]
    statistics: tuple[Any, ...]


def attended_parts(
    shape: AttentionCall, q: Tensor, k: Tensor, ends: Sequence[Tensor | None]
) -> Iterator[AttendedPart]:
    """Yield each sequence of the batch.

    Args:
        shape: layout and mask.
        q: queries.
        k: keys.
        ends: running sums of the lengths of queries and of keys, and the same with padding.
    Raises:
        UnsupportedError: there is a padding mask, and no lengths.
    """
    # Dense: every sequence has all the places of its row.
    if not shape.is_padded:
        batch = q.shape[1 if shape.name == "sbhd" else 0]
        for b in range(batch):
            place = (slice(None), b) if shape.name == "sbhd" else (b,)
            yield AttendedPart(place, place, (b,))
        return
    queries, keys, padded_queries, padded_keys = (
        None if running is None else [int(n) for n in running] for running in ends
    )
    if queries is None or keys is None:
        raise UnsupportedError("fused attention with a padding mask needs the sequences' lengths")
    for b in range(len(queries) - 1):
        num_q, num_k = queries[b + 1] - queries[b], keys[b + 1] - keys[b]
        # Packed: sequences follow one another; sums with padding say where each one begins.
        if shape.name == "thd":
            first_q = (padded_queries or queries)[b]
            first_k = (padded_keys or keys)[b]
            own = slice(first_q, first_q + num_q)
            yield AttendedPart((own,), (slice(first_k, first_k + num_k),), (own,))
        # Padded: a sequence fills the first places of its row.
        elif shape.name == "sbhd":
            yield AttendedPart(
                (slice(num_q), b), (slice(num_k), b), (b, slice(None), slice(num_q))
            )
        else:
            yield AttendedPart(
                (b, slice(num_q)), (b, slice(num_k)), (b, slice(None), slice(num_q))
            )


def statistics_shape(shape: AttentionCall, q: Tensor) -> tuple[int, ...]:
    """Return the shape of a call's log-sums, one number for each query and head."""
    if shape.name == "thd":
        return (q.shape[0], q.shape[1], 1)
    sequence, batch = (0, 1) if shape.name == "sbhd" else (1, 0)
    return (q.shape[batch], q.shape[2], q.shape[sequence], 1)
