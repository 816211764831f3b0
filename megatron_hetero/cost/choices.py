"""Settings that a plan may choose unlike the job's flags; the search and its bound share them."""

from __future__ import annotations

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Recompute

_LARGEST_SIZE = 32


def may_choose(costs: CostModel, setting: str) -> bool:
    """Return whether plans may choose a setting for themselves: the prices model it, and the
    cluster's `limits.as_given` does not hold the job to its flags."""
    return costs.has_variants and setting not in costs.cluster.limits.as_given


def micro_batch_sizes(costs: CostModel, num_replicas: int = 1) -> tuple[int, ...]:
    """Return the micro-batch sizes open to `num_replicas` replicas or more, the job's own first.
    They divide the global batch (the runtime counts in them) and leave a micro-batch for each
    replica."""
    training = costs.workload.training
    own, batch = training.micro_batch_size, training.global_batch_size
    if not may_choose(costs, "micro_batch_size"):
        return (own,)
    sizes = range(1, min(_LARGEST_SIZE, batch // num_replicas) + 1)
    others = (size for size in sizes if size != own and batch % size == 0)
    return own, *others


def may_mix_sizes(costs: CostModel) -> bool:
    """Return whether replicas may differ in micro-batch size, for which the loss has to be weighted
    by token."""
    return costs.workload.training.per_token_loss and len(micro_batch_sizes(costs)) > 1


def recomputes(costs: CostModel) -> tuple[Recompute, ...]:
    """Return the kinds of recompute that a stage may have; "full" may cover any number of its
    layers."""
    if may_choose(costs, "recompute"):
        return "none", "selective", "full"
    return (costs.workload.training.recompute,)
