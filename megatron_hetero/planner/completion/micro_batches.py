"""How many micro-batches each replica takes of the global batch, and of which size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatron_hetero.planner.completion.counts import WORTH
from megatron_hetero.planner.completion.layers import split_layers

if TYPE_CHECKING:
    from megatron_hetero.planner.completion.completer import Completer
    from megatron_hetero.planner.completion.filled import Completion


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


def mixed(completer: Completer, found: Completion) -> Completion:
    """Return a completion with other micro-batch sizes in equal replicas, if the last replica then
    ends earlier."""
    if found.sharded is not None or found.optimizer_shares is not None:
        return found
    for shape in dict.fromkeys(map(completer.shape, found.structure)):
        for size in completer.sizes(len(found.structure)):
            sizes = [
                size if completer.shape(chain) == shape else own.size
                for chain, own in zip(found.structure, found.filled, strict=True)
            ]
            other = completer.in_sizes(found.structure, sizes)
            if other is not None and other.quick_s < WORTH * found.quick_s:
                found = other
    return found
