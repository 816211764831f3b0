"""Places of a bucket's slices in this rank's memory.

Megatron's `DistributedDataParallel` accumulates gradients in one flat buffer, parameter after
parameter. `arrange` changes the order of the parameters in it, so that those that belong to one
bucket as a whole are adjacent, in the bucket's order. Such a bucket is a range of Megatron's own
buffer and needs no copy; a bucket with parts of several parameters is packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron_hetero.runtime.gradients.buckets import Bucket, ParameterSlice
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import Rows
from megatron_hetero.runtime.parallel.shards import ParameterShard

TensorOf = Callable[[torch.nn.Parameter], torch.Tensor]
"""Function that gives a tensor of a parameter: `main_grad`, `data` or `main_weight`."""


def main_grad(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the slice of the gradient buffer that belongs to a parameter."""
    return parameter.main_grad


def data(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the weights of a parameter, detached from autograd."""
    return parameter.data


def main_weight(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Return the optimizer's own copy of a parameter; the weights themselves where it has none."""
    return getattr(parameter, "main_param", parameter).data


class BucketViews:
    """The slices of one bucket as views of this rank's tensors."""

    def __init__(
        self,
        slices: Sequence[ParameterSlice],
        shards: Mapping[str, ParameterShard],
        parameters: Mapping[str, torch.nn.Parameter],
    ) -> None:
        self.slices = tuple(slices)
        self._shards = shards
        self._parameters = parameters

    @property
    def parameters(self) -> set[torch.nn.Parameter]:
        return {self._parameters[piece.name] for piece in self.slices}

    def views(self, tensor: TensorOf) -> Iterator[tuple[ParameterSlice, torch.Tensor]]:
        for piece in self.slices:
            yield piece, piece.view(self._shards, tensor(self._parameters[piece.name]))

    def rows(self, rows: Rows, tensor: TensorOf) -> torch.Tensor:
        return rows.view(self._shards, tensor(self._parameters[rows.slice.name]))

    def parameter(self, rows: Rows) -> torch.nn.Parameter:
        return self._parameters[rows.slice.name]

    def in_place(self, tensor: TensorOf) -> torch.Tensor | None:
        """Return the whole bucket as a flat view if the slices are adjacent; otherwise None."""
        found = joined([view for _, view in self.views(tensor)])
        return found[0] if len(found) == 1 and found[0].is_contiguous() else None

    def runs(self, tensor: TensorOf) -> list[torch.Tensor]:
        """Return the fewest views of memory that the slices fill, each element once."""
        views = [view for _, view in self.views(tensor)]
        return joined(sorted(views, key=torch.Tensor.data_ptr))

    def pack(self, tensor: TensorOf) -> torch.Tensor:
        return torch.cat([view.reshape(-1) for _, view in self.views(tensor)])

    def unpack(self, flat: torch.Tensor, tensor: TensorOf) -> None:
        offset = 0
        for _, view in self.views(tensor):
            view.copy_(flat[offset : offset + view.numel()].view(view.shape))
            offset += view.numel()


def joined(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Join views that follow each other in one storage; each joined view is flat.

    A view with gaps between its elements stays alone, as it is.
    """
    found: list[torch.Tensor] = []
    for view in views:
        if not view.is_contiguous():
            found.append(view)
            continue
        last = found[-1] if found and found[-1].is_contiguous() else None
        if last is not None and _follows(last, view):
            found[-1] = last.as_strided((last.numel() + view.numel(),), (1,))
        else:
            found.append(view.view(-1))
    return found


def _follows(last: torch.Tensor, view: torch.Tensor) -> bool:
    is_same = last.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()
    return is_same and last.storage_offset() + last.numel() == view.storage_offset()


def bucket_order(
    buckets: Sequence[Sequence[torch.nn.Parameter]],
) -> Callable[[torch.nn.Parameter], tuple[bool, tuple[int, int]]]:
    """Return the sort key of parameters whose memory is dealt out bucket by bucket.

    Parameters wholly in one bucket come first, in the bucket's order, so that the bucket is
    adjacent. Parameters cut into several buckets follow, by their first slices.

    Args:
        buckets: [bucket][slice] -> parameter of the slice.
    """
    # Parameter -> its slices, as (bucket, index in the bucket).
    places: dict[torch.nn.Parameter, list[tuple[int, int]]] = {}
    for number, bucket in enumerate(buckets):
        for index, parameter in enumerate(bucket):
            places.setdefault(parameter, []).append((number, index))

    def key(parameter: torch.nn.Parameter) -> tuple[bool, tuple[int, int]]:
        # A parameter that no bucket has is frozen, or equal on its holders by itself.
        slices = places.get(parameter)
        if slices is None:
            return True, (0, 0)
        return slices[0][0] != slices[-1][0], slices[0]

    return key


def arrange(
    model: Iterable[Any],
    buckets: Sequence[Bucket],
    parameters: Mapping[str, torch.nn.Parameter],
) -> None:
    """Order the gradients in the buffers of `model` (DDP-wrapped chunks) by bucket.

    Call it before the first backward pass. Only views move: Megatron zeroes, scales and offloads
    whole buffers, and all other code finds a gradient by its parameter's `main_grad`.

    Args:
        model: the DDP-wrapped chunks.
        buckets: buckets of this rank, in order.
        parameters: the rank's parameters by global name.
    """
    key = bucket_order([[parameters[piece.name] for piece in b.slices] for b in buckets])
    # Deal the buffer's memory out anew in that order.
    for chunk in model:
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            if buffer.extra_main_grads:
                continue  # some gradients accumulate outside of the buffer, in fp32
            offset = 0
            for parameter in sorted(buffer.params, key=key):
                end = offset + parameter.numel()
                parameter.main_grad = buffer.grad_data[offset:end].view(parameter.shape)
                offset = end
