"""New weights that travel during the first forward passes: when each stage needs them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from megatron_hetero.cost.sync.buckets import EMBEDDING, StageBucket, StageId
from megatron_hetero.schedule.exchange.early import PassLayers
from megatron_hetero.schedule.parts import Collective, FirstUse


class ForwardLayers(PassLayers):
    """The forward passes of a stage."""

    def first_use(self, layer: int) -> FirstUse:
        """Return when a first forward pass comes to `layer`."""
        return FirstUse(*self.place_of(layer))


NO_FORWARDS: Mapping[StageId, ForwardLayers] = MappingProxyType({})
"""New weights are waited for after the update."""


def in_order_of_use(
    gathers: Sequence[tuple[StageBucket, Collective]], forwards: Mapping[StageId, ForwardLayers]
) -> tuple[Collective, ...]:
    """Let our runtime's gathers start together, in the order of the forward pass; each is waited
    for at the first use of its layers (`runtime.gradients.sharding.parameter_gather`).

    Args:
        gathers: with their buckets, in the order of the backward pass.
        forwards: of all stages; without, all are waited for, and come as they are.
    """
    if not forwards:
        return tuple(made for _, made in gathers)
    return tuple(
        replace(
            made,
            buffers={},
            needed={holder: forwards[holder].first_use(bucket.layer) for holder in bucket.holders},
        )
        for bucket, made in reversed(gathers)
    )


def stock_in_order_of_use(
    gathers: Sequence[tuple[StageBucket, int | None, Collective]],
    forwards: Mapping[StageId, ForwardLayers],
) -> tuple[Collective, ...]:
    """Do the same for stock Megatron, which cuts a first stage's first chunk into buckets alone;
    any other chunk needs all of its weights at its begin.

    Args:
        gathers: bucket, chunk and collective, chunk by chunk in the order of the backward pass.
        forwards: as of `in_order_of_use`.
    """
    if not forwards:
        return tuple(made for *_, made in gathers)

    def needed(bucket: StageBucket, chunk: int | None) -> dict[StageId, FirstUse]:
        if bucket.layer == EMBEDDING:
            return dict.fromkeys(bucket.holders, FirstUse(chunk or 0))
        return {holder: forwards[holder].first_use(bucket.layer) for holder in bucket.holders}

    # First chunks first, and of each chunk what the forward pass reaches first.
    ordered = sorted(gathers, key=lambda entry: (entry[1] or 0, entry[0].layer))
    return tuple(
        replace(made, buffers={}, needed=needed(bucket, chunk)) for bucket, chunk, made in ordered
    )
