"""How many micro-batches each replica takes of the global batch."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.planner.division.layers import split_layers


def share_micro_batches(
    num_micro_batches: int, fill_times_s: Sequence[float], periods_s: Sequence[float]
) -> tuple[int, ...] | None:
    """Return shares that let the last replica end as early as possible; None when there are fewer
    than replicas.

    Replica r with m micro-batches takes `fill_times_s[r] + (m - 1) * periods_s[r]`: straight lines,
    as layers on stages are, and divided in the same way.
    """
    base_s = [fill - period for fill, period in zip(fill_times_s, periods_s, strict=True)]
    return split_layers(num_micro_batches, periods_s, base_s, [num_micro_batches] * len(base_s))
