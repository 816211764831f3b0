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
from dataclasses import dataclass, replace
from typing import Any

from megatron.core import parallel_state as mpu

from megatron_hetero.plan.plan import StageShape
from megatron_hetero.plan.sharding.shards import COLUMN_BLOCK, block_edges, shard_edges

_ATTRIBUTE = "hetero_tensor_place"
_DIVIDED_EVENLY = (".self_attention.linear_q_down_proj.", ".self_attention.linear_kv_down_proj.")
"""The ranks of latent attention: Megatron's local layers divide them, and gather them again."""
_OVER_THE_VOCABULARY = (
    "embedding.word_embeddings.weight",
    "output_layer.weight",
    "output_layer.bias",
)


@dataclass(frozen=True)
class DealtExperts:
    """Place of a rank among those that hold every expert of their layers once.

    Attributes:
        edges: of the whole experts of each group of experts.
        index: this rank's group of experts.
        width: ranks that divide each expert of a group.
        part: this rank's part of each.
        is_apart: these ranks are others than those of the tensor-parallel group.
    """

    edges: tuple[int, ...]
    index: int
    width: int = 1
    part: int = 0
    is_apart: bool = False


@dataclass(frozen=True)
class TensorPlace:
    """Place `index` of `width` in a tensor-parallel group.

    `query_groups`, `vocabulary_rows` and the three kinds of columns are the edges of all ranks'
    parts (`plan.sharding.shards.shard_edges`); a group that divides everything evenly has one unit
    for each rank. `mlp_columns` are those of dense layers, `expert_columns` of each expert,
    `shared_columns` of the shared expert; of what a model does not have the edges are even.
    """

    width: int
    index: int
    query_groups: tuple[int, ...]
    mlp_columns: tuple[int, ...]
    expert_columns: tuple[int, ...]
    shared_columns: tuple[int, ...]
    vocabulary_rows: tuple[int, ...]
    is_even: bool = True
    dealt: DealtExperts | None = None
    """Experts that are dealt out; None where every rank of the group has a part of all."""

    @classmethod
    def even(cls, width: int, index: int) -> TensorPlace:
        edges = tuple(range(width + 1))
        return cls(width, index, edges, edges, edges, edges, edges)

    @classmethod
    def of_stage(
        cls, shape: StageShape, index: int, args: Any, expert_place: tuple[int, int] = (0, 0)
    ) -> TensorPlace:
        """Return the place of a rank on a stage.

        Args:
            shape: of the stage.
            index: of the rank in its tensor-parallel group.
            args: Megatron's, of the model.
            expert_place: `ExpertGroup.place`, where experts are dealt out over replicas.
        Raises:
            PlanFormatError: there are fewer query groups or columns than ranks.
        """
        width, shares = shape.tensor_parallel, shape.shares
        dealt = None
        units = divided_units(args)
        if shape.expert_shares is not None:
            experts = shard_edges(args.num_experts, width, shape.expert_shares)
            dealt = DealtExperts(experts, index)
        elif shape.expert_groups is not None:
            size, parts = shape.expert_groups
            experts = shard_edges(args.num_experts, size, None)
            dealt = DealtExperts(experts, expert_place[0], parts, expert_place[1], is_apart=True)
        # Experts that are dealt out have edges of their own: shares do not cut their columns.
        if dealt is not None:
            units.pop("expert_columns")
        # Equal shares that divide everything are Megatron's own division.
        divisible = all(number % width == 0 for number in units.values())
        if shares is None or (len(set(shares)) == 1 and divisible):
            return replace(cls.even(width, index), dealt=dealt)
        # Kinds of units that the model does not have count as even.
        edges = dict.fromkeys(_UNITS, tuple(range(width + 1)))
        edges |= {
            name: block_edges(number, 1 if name == "query_groups" else COLUMN_BLOCK, width, shares)
            for name, number in units.items()
        }
        rows = block_edges(args.padded_vocab_size, args.make_vocab_size_divisible_by, width, shares)
        return cls(width, index, vocabulary_rows=rows, is_even=False, dealt=dealt, **edges)

    def part_of(self, name: str) -> tuple[tuple[int, ...], int]:
        """Return the edges, in units of its own, of the divided dimension of parameter `name`, and
        this rank's place among them."""
        if self.dealt is not None and ".mlp.experts." in name:
            return tuple(range(self.dealt.width + 1)), self.dealt.part
        return self._edges_of(name), self.index

    def _edges_of(self, name: str) -> tuple[int, ...]:
        # From the special names to the general ones: the first match counts.
        if any(part in name for part in _DIVIDED_EVENLY):
            return tuple(range(self.width + 1))
        if ".self_attention." in name:
            return self.query_groups
        if ".mlp.shared_experts." in name:
            return self.shared_columns
        if ".mlp.experts." in name:
            return self.expert_columns
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
        units = divided_units(args)
        heads_per_group = args.num_attention_heads // units["query_groups"]
        # Megatron divides by the width again, which leaves this rank's own part.
        own_groups = self._own(self.query_groups) * self.width
        sizes: dict[str, Any] = {
            "num_attention_heads": own_groups * heads_per_group,
            "padded_vocab_size": self._own(self.vocabulary_rows) * self.width,
        }
        sizes |= {
            size: self._own(getattr(self, name)) * self.width
            for name, size in _COLUMNS.items()
            if name in units and not (name == "expert_columns" and self.dealt)
        }
        if args.group_query_attention:
            sizes["num_query_groups"] = own_groups
        saved = {name: getattr(args, name) for name in sizes}
        vars(args).update(sizes)
        try:
            yield
        finally:
            vars(args).update(saved)

    @property
    def first_expert(self) -> int:
        """Return the number of this rank's first expert; 0 where every rank has a part of all."""
        return 0 if self.dealt is None else self.dealt.edges[self.dealt.index]

    def _own(self, edges: tuple[int, ...]) -> int:
        return edges[self.index + 1] - edges[self.index]


_COLUMNS = {
    "mlp_columns": "ffn_hidden_size",
    "expert_columns": "moe_ffn_hidden_size",
    "shared_columns": "moe_shared_expert_intermediate_size",
}
"""Megatron's argument with the width of each kind of MLP."""
_UNITS = ("query_groups", *_COLUMNS)


def divided_units(args: Any) -> dict[str, int]:
    """Count the units of the whole model that a group divides, by the field of `TensorPlace`."""
    groups = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    kinds = set() if args.num_experts is None else {"expert_columns"}
    if args.num_experts is None or has_dense_layers(args):
        kinds.add("mlp_columns")
    if args.num_experts is not None and args.moe_shared_expert_intermediate_size is not None:
        kinds.add("shared_columns")
    return {"query_groups": int(groups)} | {
        name: int(getattr(args, size)) for name, size in _COLUMNS.items() if name in kinds
    }


def has_dense_layers(args: Any) -> bool:
    """Tell if `--moe-layer-freq` leaves some layers of a model of experts dense."""
    frequency = args.moe_layer_freq
    return frequency > 1 if isinstance(frequency, int) else 0 in frequency


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
