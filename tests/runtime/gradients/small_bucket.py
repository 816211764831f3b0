"""A bucket of three parameters on the ranks of a small world: dense rows, a window of columns,
which is not dense, and a norm."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_hetero.runtime.gradients.buckets import Bucket, ParameterSlice
from megatron_hetero.runtime.gradients.memory import BucketViews
from megatron_hetero.runtime.parallel.shards import ParameterShard

SHARDS = {
    "rows": ParameterShard("rows", (6, 4), 0, ((0, 6),), True, False),
    "columns": ParameterShard("columns", (5, 8), 1, ((0, 8),), True, False),
    "norm": ParameterShard("norm", (7,), 0, ((0, 7),), False, False),
}
SLICES = (
    ParameterSlice("rows", 1, 5),
    ParameterSlice("columns", 2, 6),
    ParameterSlice("norm", 0, 7),
)
SIZE = 4 * 4 + 5 * 4 + 7
CHECKS = SimpleNamespace(
    check_for_nan_in_grad=True, check_for_large_grads=False, grad_reduce_in_fp32=True
)


def bucket(num_holders: int) -> Bucket:
    """The bucket, held by the first ranks."""
    return Bucket(tuple(range(num_holders)), SLICES)


def gradients(rank: int, name: str, step: int = 0) -> torch.Tensor:
    """A rank's gradients of a parameter: small whole numbers, whose sums are exact."""
    seed = 1000 * step + 10 * rank + sorted(SHARDS).index(name)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, SHARDS[name].global_shape, generator=generator).float()


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The bucket's elements of these tensors, in its order."""
    return torch.cat([piece.view(SHARDS, tensors[piece.name]).reshape(-1) for piece in SLICES])


def of_rank(rank: int, step: int = 0) -> torch.Tensor:
    """The bucket of a rank's gradients, flat."""
    return flat({name: gradients(rank, name, step) for name in SHARDS})


def sum_of(weights: list[float], step: int = 0) -> torch.Tensor:
    """The weighted sum over ranks, flat."""
    parts = [weight * of_rank(rank, step) for rank, weight in enumerate(weights)]
    return torch.stack(parts).sum(0)


def parameters(rank: int) -> dict[str, torch.nn.Parameter]:
    """This rank's parameters: their gradients, and weights that begin with the rank's number."""
    made = {}
    for name, shard in SHARDS.items():
        weights = 100.0 * rank + gradients(rank, name, step=9)
        made[name] = torch.nn.Parameter(weights.view(shard.global_shape))
        made[name].main_grad = gradients(rank, name)  # type: ignore[attr-defined]
    return made


def views(own: dict[str, torch.nn.Parameter]) -> BucketViews:
    """The bucket as views of parameters."""
    return BucketViews(SLICES, SHARDS, own)
