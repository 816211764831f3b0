"""Megatron's distributed optimizer across unlike replicas: each rank updates the pieces it owns.

Megatron's ordinary optimizer (fp32, or bf16 and fp16 with fp32 main weights) gets the pieces of
weights that this rank owns in the place of a model: views of the weights, with views of the reduced
gradients. Parameter groups, loss scale, clipping and update are therefore Megatron's own, and there
is state for these pieces only. After the optimizer's step the owners send the new weights to all
holders.

Every piece has one owner in the job, so the norm counts each element once. In a checkpoint a piece
stands at its place in the global tensor, under the key that the whole would have without this
optimizer: a checkpoint saved with it loads without, under any other plan, and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.utils import get_model_config

from megatron_hetero.errors import CheckpointError
from megatron_hetero.runtime.gradients.memory import data, main_grad
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import Rows
from megatron_hetero.runtime.gradients.sync import GradientSync, gradient_sync
from megatron_hetero.runtime.state.checkpoint import keep_axes


@dataclass(frozen=True)
class OwnedPiece:
    """Rows of a weight whose optimizer state is on this rank.

    `tensor` is a view of the weight. In fp32, where the view would not be dense, it is a copy,
    because a fused optimizer writes to it in memory order.
    """

    name: str
    rows: Rows
    parameter: torch.nn.Parameter
    tensor: torch.nn.Parameter
    view: torch.Tensor
    is_sole_owner: bool

    def read_weights(self) -> None:
        if self.tensor.data_ptr() != self.view.data_ptr():
            self.tensor.data.copy_(self.view)

    def write_weights(self) -> None:
        if self.tensor.data_ptr() != self.view.data_ptr():
            self.view.copy_(self.tensor.data)


def owned_pieces(sync: GradientSync) -> tuple[OwnedPiece, ...]:
    """Return all pieces of this rank: its rows of divided buckets and of sharded layers, and its
    unshared slices."""
    pieces = []
    # Rows that no other rank updates: of divided buckets, then of sharded layers.
    for reduction in sync.divided:
        gradients = reduction.own_gradients
        for (rows, view), gradient in zip(reduction.own_views(data), gradients, strict=True):
            pieces.append(_piece(rows, reduction.views.parameter(rows), view, gradient, True))
    for bucket in sync.sharded.buckets:
        for rows, parameter, weights, gradient in bucket.pieces():
            pieces.append(_piece(rows, parameter, weights, gradient, True))
    # Slices without a bucket: other ranks of the group may update copies of these.
    for (part, view), (_, gradient) in zip(
        sync.local.views(data), sync.local.views(main_grad), strict=True
    ):
        rows = Rows(part, 0, view.shape[0])
        pieces.append(_piece(rows, sync.parameters[part.name], view, gradient, False))
    return tuple(pieces)


def _piece(
    rows: Rows,
    parameter: torch.nn.Parameter,
    view: torch.Tensor,
    gradient: torch.Tensor,
    is_sole_owner: bool,
) -> OwnedPiece:
    # Weights in half precision have dense fp32 copies in Megatron's optimizer anyway.
    dense = view.is_contiguous() or view.dtype != torch.float32
    tensor = torch.nn.Parameter(view if dense else view.contiguous())
    # What Megatron has noted on the parameter (kind of layer, parallelism) holds for its pieces.
    vars(tensor).update(vars(parameter))
    tensor.main_grad = gradient
    if is_sole_owner:
        # The norm leaves out copies on other tensor-parallel ranks and replicas; this is none.
        tensor.tensor_model_parallel = True
        tensor.shared = False
    return OwnedPiece(rows.slice.name, rows, parameter, tensor, view, is_sole_owner)


class OwnedModel:
    """Substitute for a model chunk in Megatron's optimizer: the owned pieces by name."""

    def __init__(self, pieces: Sequence[OwnedPiece], chunk: Any) -> None:
        self._pieces = pieces
        self.config = get_model_config(chunk)
        self.ddp_config = chunk.ddp_config

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        for piece in self._pieces:
            yield piece.name, piece.tensor

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        for piece in self._pieces:
            yield piece.tensor


def build_optimizer(
    get_megatron_optimizer: Callable[..., Any],
    config: Any,
    model: Sequence[Any],
    *args: Any,
    **kwargs: Any,
) -> DividedOptimizer:
    """Build Megatron's optimizer of `config` over the owned pieces of `model`.

    Args:
        get_megatron_optimizer: Megatron's function.
        config: Megatron's configuration of the optimizer.
        model: the DDP-wrapped chunks, with a gradient sync.
        args: further arguments of the function.
        kwargs: further keyword arguments of the function.
    """
    sync = gradient_sync(get_model_config(model[0]))
    if sync is None:
        raise RuntimeError("the model has no gradient sync; synchronise_hook comes first")
    pieces = owned_pieces(sync)
    made = get_megatron_optimizer(config, [OwnedModel(pieces, model[0])], *args, **kwargs)
    return DividedOptimizer(made.chained_optimizers, sync, pieces)


class DividedOptimizer(ChainedOptimizer):
    """Megatron's optimizer over owned pieces, and the exchange of weights after its step."""

    def __init__(
        self, optimizers: list[Any], sync: GradientSync, pieces: Sequence[OwnedPiece]
    ) -> None:
        super().__init__(optimizers)
        self._sync = sync
        self._pieces = tuple(pieces)

    @property
    def pieces(self) -> tuple[OwnedPiece, ...]:
        return self._pieces

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        for piece in self._pieces:
            piece.read_weights()
        return bool(super().prepare_grads())

    @torch.no_grad()
    def step_with_ready_grads(self) -> bool:
        success = bool(super().step_with_ready_grads())
        self.give_weights()
        return success

    def give_weights(self) -> None:
        """Send the weights of the owned pieces to all holders."""
        for piece in self._pieces:
            piece.write_weights()
        self._sync.weights.give()

    def sharded_state_dict(
        self, model_sharded_state_dict: Any, is_loading: bool = False, **kwargs: Any
    ) -> Any:
        """Describe the state of the owned pieces by their places in the global tensors."""
        if not is_loading:
            # Some pieces are copies of weights, which may have been loaded since the last step.
            with torch.no_grad():
                for piece in self._pieces:
                    piece.read_weights()
        entries, _ = extract_sharded_tensors_and_factories(model_sharded_state_dict)
        by_data = {id(entry.data): entry for entry in nested_values(entries)}
        described = {
            str(number): self._describe(piece, by_data) for number, piece in enumerate(self._pieces)
        }
        return super().sharded_state_dict(described, is_loading, **kwargs)

    def _describe(
        self, piece: OwnedPiece, by_data: Mapping[int, Any]
    ) -> ShardedTensor | ShardedTensorFactory:
        # The model's own description of the whole parameter, and the piece's first row in it.
        shard = self._sync.shards[piece.name]
        num_dims = len(shard.global_shape)
        whole = by_data[id(piece.parameter)]
        first = shard.local_offset(piece.rows.slice.start)
        if isinstance(whole, ShardedTensorFactory):
            # The piece lies in one of the parts: of the two of a gated projection.
            for part in whole.build():
                length = part.local_shape[len(part.local_shape) - num_dims + shard.dim]
                if first < length:
                    whole = part
                    break
                first -= length
        if not isinstance(whole, ShardedTensor):
            raise CheckpointError(f"{piece.name}: no such tensor in the model's checkpoint")
        # Move the description's offset to the piece; layers may be stacked in axes before.
        offset = list(whole.global_offset)
        axis = len(offset) - num_dims
        offset[axis + shard.dim] += first
        offset[axis] += piece.rows.start
        # The piece is an ordinary sharded tensor: any plan can read it.
        described = replace(
            whole,
            data=piece.tensor,
            dtype=piece.tensor.dtype,
            local_shape=tuple(piece.tensor.shape),
            global_offset=tuple(offset),
            axis_fragmentations=None,
            prepend_axis_num=axis,
            replica_id=0 if piece.is_sole_owner else whole.replica_id,
        )
        return keep_axes(described)
