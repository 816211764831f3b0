"""Bytes that a plan's ranks handed to the transport, beside the least possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.parallel.traffic import BoundaryTraffic, RankTraffic


def sync_to_data(ranks: Sequence[RankTraffic]) -> dict[str, float] | None:
    """Return the gradient sync's bytes beside the least; None under stock Megatron."""
    if not ranks:
        return None
    # Bytes of all ranks and steps together.
    payload = sum(rank.payload_bytes for rank in ranks)
    return {
        "most_collectives_per_step": max(r.num_collectives / max(r.num_steps, 1) for r in ranks),
        "bytes": payload,
        "least_bytes": sum(rank.bound_bytes * rank.num_steps for rank in ranks),
        "bytes_over_least": max(rank.ratio for rank in ranks),
        "copied_share": sum(r.packed_bytes for r in ranks) / payload if payload else 0.0,
    }


def boundaries_to_data(
    plan: Plan, ranks: Sequence[Mapping[int, BoundaryTraffic]]
) -> list[dict[str, Any]]:
    """Return the bytes sent in the whole run by each stage over each boundary.

    The least is every tensor once: all ranks of a stage send it together.

    Args:
        plan: the plan.
        ranks: [rank] -> traffic by boundary; empty under stock Megatron.
    """
    sent: dict[tuple[int, int, int], list[BoundaryTraffic]] = {}
    for place, boundaries in zip(rank_table(plan), ranks, strict=True):
        for number, traffic in boundaries.items():
            sent.setdefault((place.replica, number, place.stage), []).append(traffic)
    found = []
    for (replica, number, stage), parts in sorted(sent.items()):
        # Each rank hands over its own piece; all ranks count the same whole tensor.
        handed, least = sum(part.handed_bytes for part in parts), parts[0].tensor_bytes
        found.append(
            {
                "replica": replica,
                "boundary": number,
                "from_stage": stage,
                "messages": parts[0].num_messages,
                "bytes": handed,
                "least_bytes": least,
                "bytes_over_least": handed / least if least else 1.0,
            }
        )
    return found
