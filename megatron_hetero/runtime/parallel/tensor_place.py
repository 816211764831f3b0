"""A rank's place in its tensor-parallel group, and the group's division of the model.

Megatron divides every size by the width. A rank with an uneven share gets sizes of its own to
divide: with 3 of 8 query groups at width 4 it builds a model of 12 groups, a quarter of which are
its 3. Every layer (Megatron's or Transformer Engine's) then has the right local shape, and the
group exchanges tensors with the shape of activations, which shares do not change.
`runtime.megatron.vocabulary_range` tells Megatron the vocabulary rows of each rank. Sequences
always divide evenly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_hetero.plan.plan import StageShape
from megatron_hetero.plan.sharding.shards import shard_edges, vocabulary_edges

_ATTRIBUTE = "hetero_tensor_place"
_OVER_THE_VOCABULARY = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
)


@dataclass(frozen=True)
class TensorPlace:
    """Place `index` of `width` in a tensor-parallel group.

    `query_groups`, `mlp_columns` and `vocabulary_rows` are the edges of all ranks' parts
    (`plan.sharding.shards.shard_edges`); a group that divides everything evenly has one unit for
    each rank.
    """

    width: int
    index: int
    query_groups: tuple[int, ...]
    mlp_columns: tuple[int, ...]
    vocabulary_rows: tuple[int, ...]
    is_even: bool = True

    @classmethod
    def even(cls, width: int, index: int) -> TensorPlace:
        edges = tuple(range(width + 1))
        return cls(width, index, edges, edges, edges)

    @classmethod
    def of_stage(cls, shape: StageShape, index: int, args: Any) -> TensorPlace:
        """Return the place of rank `index` on a stage, for the model of Megatron's `args`.

        Raises:
            PlanFormatError: there are fewer query groups or columns than ranks.
        """
        width, shares = shape.tensor_parallel, shape.shares
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        columns = mlp_columns(args)
        divisible = groups % width == 0 and columns % width == 0
        if shares is None or (len(set(shares)) == 1 and divisible):
            return cls.even(width, index)
        return cls(
            width,
            index,
            shard_edges(groups, width, shares),
            shard_edges(columns, width, shares),
            vocabulary_edges(
                args.padded_vocab_size, args.make_vocab_size_divisible_by, width, shares
            ),
            is_even=False,
        )

    def edges_of(self, name: str) -> tuple[int, ...]:
        """Return the edges, in units of its own, of the divided dimension of parameter `name`."""
        if ".self_attention." in name:
            return self.query_groups
        if ".mlp." in name:
            return self.mlp_columns
        if name in _OVER_THE_VOCABULARY:
            return self.vocabulary_rows
        return tuple(range(self.width + 1))

    @contextmanager
    def own_sizes(self, args: Any) -> Iterator[None]:
        """Let `args` have the sizes from which this rank's model is built."""
        if self.is_even:
            yield
            return
        groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
        heads_per_group = args.num_attention_heads // groups
        own_groups = self._own(self.query_groups) * self.width
        sizes: dict[str, Any] = {
            "num_attention_heads": own_groups * heads_per_group,
            "ffn_hidden_size": self._own(self.mlp_columns) * self.width,
            "moe_ffn_hidden_size": self._own(self.mlp_columns) * self.width,
            "padded_vocab_size": self._own(self.vocabulary_rows) * self.width,
        }
        if args.num_experts is None:
            del sizes["moe_ffn_hidden_size"]
        if args.group_query_attention:
            sizes["num_query_groups"] = own_groups
        saved = {name: getattr(args, name) for name in sizes}
        vars(args).update(sizes)
        try:
            yield
        finally:
            vars(args).update(saved)

    def _own(self, edges: tuple[int, ...]) -> int:
        return edges[self.index + 1] - edges[self.index]


def mlp_columns(args: Any) -> int:
    """Return the columns of every layer's MLP, or of each of its experts, in the whole model."""
    if args.num_experts is None:
        return int(args.ffn_hidden_size)
    return int(args.moe_ffn_hidden_size)


def set_tensor_place(config: Any, place: TensorPlace) -> None:
    """Store `place` on a model's configuration, where `tensor_place` finds it."""
    setattr(config, _ATTRIBUTE, place)


def tensor_place(config: Any) -> TensorPlace:
    """Return the place of this rank; for stock Megatron, from Megatron's own groups."""
    place = getattr(config, _ATTRIBUTE, None)
    if place is not None:
        return place
    return TensorPlace.even(
        mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    )
