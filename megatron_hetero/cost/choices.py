"""What a plan may do unlike the job's own flags: the same list for the search and for its bound."""

from __future__ import annotations

from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import Recompute

_LARGEST_SIZE = 32


def may_choose(costs: CostModel, setting: str) -> bool:
    """Whether plans may have a setting of their own: the prices say what it does, and the cluster's
    `limits.as_given` does not hold the job to its flags."""
    return costs.has_variants and setting not in costs.cluster.limits.as_given


def micro_batch_sizes(costs: CostModel, num_replicas: int = 1) -> tuple[int, ...]:
    """Micro-batch sizes of so many replicas or more: they divide the global batch (the runtime
    counts in them) and leave a micro-batch for each.  The job's own comes first."""
    training = costs.workload.training
    own, batch = training.micro_batch_size, training.global_batch_size
    if not may_choose(costs, "micro_batch_size"):
        return (own,)
    sizes = range(1, min(_LARGEST_SIZE, batch // num_replicas) + 1)
    others = (size for size in sizes if size != own and batch % size == 0)
    return own, *others


def may_mix_sizes(costs: CostModel) -> bool:
    """Whether replicas may have unlike micro-batch sizes: the loss has to be weighted by token."""
    return costs.workload.training.per_token_loss and len(micro_batch_sizes(costs)) > 1


def recomputes(costs: CostModel) -> tuple[Recompute, ...]:
    """Kinds of recompute that a stage may have; of "full" any number of layers."""
    if may_choose(costs, "recompute"):
        return "none", "selective", "full"
    return (costs.workload.training.recompute,)
