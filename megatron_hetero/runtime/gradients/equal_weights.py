"""Equal weights on all holders of a slice: made so before the first step, and compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from megatron_hetero.runtime.gradients.memory import data
from megatron_hetero.runtime.gradients.reduction import Reduction
from megatron_hetero.runtime.gradients.sharding.sharded_buckets import ShardedBucket

Buckets = Iterable[Reduction | ShardedBucket]


def equalise(
    buckets: Buckets,
    places: Sequence[tuple[int, ...]],
    is_mixed: Callable[[Iterable[int]], bool],
) -> None:
    """Give all holders of a slice the first place's weights, to the last bit.

    First is meant in the order of the plan, not of ranks: Megatron leaves zeros in the copy of a
    tied embedding on the last stage, which may have the lower rank.

    Args:
        buckets: those of this rank, in the order in which all ranks have them.
        places: [rank] -> its place in the plan.
        is_mixed: tells if some ranks compute in unlike precisions.
    """
    for bucket in buckets:
        flat = bucket.views.pack(data)
        holders = dist.get_process_group_ranks(bucket.group)
        # fp32 holds weights of every precision exactly.
        if is_mixed(holders):
            flat = flat.float()
        own = [places[rank] for rank in holders]
        dist.broadcast(flat, group=bucket.group, group_src=own.index(min(own)))
        if isinstance(bucket, Reduction):
            bucket.keep_weights(flat)
        else:
            bucket.views.unpack(flat, data)


def are_equal(buckets: Buckets) -> bool:
    """Compare the weights of this rank's buckets over their holders, by a hash of each; a
    collective of the whole job."""
    equal = True
    for bucket in buckets:
        # numpy has no bf16.
        flat = bucket.views.pack(data).detach().float().cpu().numpy()
        own = list(hashlib.sha256(flat.tobytes()).digest())
        digest = torch.tensor(own, dtype=torch.uint8, device=torch.cuda.current_device())
        found = [torch.empty_like(digest) for _ in range(bucket.group.size())]
        dist.all_gather(found, digest, group=bucket.group)
        equal &= all(torch.equal(digest, other) for other in found)
    return equal
