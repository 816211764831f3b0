"""Runs of layers with the same holders, and their exchanges."""

from __future__ import annotations

from megatron_hetero.cost.network.holder_flow import Flow, HolderFlow, Ints
from megatron_hetero.cost.sync.buckets import StageId
from megatron_hetero.cost.sync.groups import SyncGroup
from megatron_hetero.hashed import value


@value(frozen=True)
class ExchangePrices:
    """An exchange over some holders: of gradients and of new weights."""

    gradients: HolderFlow
    weights: HolderFlow | None
    num_rank_sets: int
    is_by_groups: bool = False
    """True if the exchange runs in rounds; the runtime has as many rounds under way as buffers."""


@value(frozen=True)
class ExchangeRun:
    """One set of holders: its parameters, buckets, and what it loads on its paths."""

    group: SyncGroup
    waiting: tuple[StageId, ...]
    """One holder of each kind: those of a kind come to the exchange together (`witness_of`)."""
    bucket_share: float
    """Part of its parameters in each bucket but the last."""
    rank_bytes: float
    """Bytes of a bucket of one rank set."""
    prices: ExchangePrices
    gradients: Flow
    weights: Flow | None
    places: Ints
    """The holders' places in the layout's order of stages."""
