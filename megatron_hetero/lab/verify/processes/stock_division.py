"""Whole gradients and weights of ranks whose optimizer stock Megatron divides.

After its reduce-scatter each data-parallel rank holds the sums of its own part of every bucket
only, and with `--overlap-param-gather` new weights travel until the forward pass needs them. The
record of a rank needs both whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.distributed.param_and_grad_buffer import shard_buffer


def gather_gradients(model: Sequence[Any]) -> None:
    """Fill every bucket with the sums of all ranks; the optimizer reads its own part alone."""
    for group in _bucket_groups(model):
        size = group.intra_distributed_optimizer_instance_size
        for bucket in group.buckets:
            # This rank's part of the bucket has the sums; the others come from their owners.
            own = shard_buffer(bucket.grad_data, size)[
                group.intra_distributed_optimizer_instance_rank
            ]
            dist.all_gather_into_tensor(
                bucket.grad_data,
                own.clone(),
                group=group.intra_distributed_optimizer_instance_group,
            )


def gather_weights(model: Sequence[Any]) -> None:
    """Finish gathers of new weights; call it between an update and a forward pass."""
    for chunk in model:
        if _is_divided(chunk) and chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)


def _bucket_groups(model: Sequence[Any]) -> Iterator[Any]:
    for chunk in model:
        if _is_divided(chunk):
            yield from (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)


def _is_divided(chunk: Any) -> bool:
    config = getattr(chunk, "ddp_config", None)
    return config is not None and config.use_distributed_optimizer
