"""The model and the job in Megatron's words, without torch: shapes, training, user's flags."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from megatron_hetero.hashed import hashed_once
from megatron_hetero.model.training import ONLY_IF_SET, TrainingSpec
from megatron_hetero.model.unread import Unread

MAX_LAYERS = 100_000
"""Largest number of layers read: a line of text must not be able to fill the memory."""


@hashed_once
@dataclass(frozen=True)
class ModelSpec:
    """Shape of a GPT-like decoder.  Field names are Megatron's (`--num-layers` -> `num_layers`).

    Sizes are in elements.  `num_query_groups` equals `num_attention_heads` without GQA;
    `num_experts` is 0 for a dense model.  `vocab_size` is the tokenizer's, not the padded one.

    `moe_layer_freq` has 1 for each layer with experts and 0 for each dense one, shape [layer]; it
    is empty where all layers are alike.  `kv_lora_rank` is 0 without multi-latent attention, of
    which the five sizes from `q_lora_rank` on are (0: queries have no latents); `divides_latents`
    says that a tensor-parallel group divides the projections to the latents, as Megatron's local
    layers do and Transformer Engine's do not.  `learns_softmax_offset`: each head has an offset
    of its softmax as a parameter.  `mtp_num_layers` predict further tokens behind the last stage's
    own layers, each as the last of those.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    vocab_size: int
    seq_length: int
    max_position_embeddings: int
    gated_mlp: bool = False
    tied_embeddings: bool = True
    add_bias_linear: bool = True
    add_qkv_bias: bool = False
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    position_embedding: Literal["learned_absolute", "rope", "yarn", "none"] = "learned_absolute"
    qk_layernorm: bool = False
    num_experts: int = 0
    moe_router_topk: int = 0
    moe_ffn_hidden_size: int = 0
    make_vocab_size_divisible_by: int = 128
    moe_layer_freq: tuple[int, ...] = field(default=(), metadata=ONLY_IF_SET)
    moe_shared_expert_intermediate_size: int = field(default=0, metadata=ONLY_IF_SET)
    moe_shared_expert_gate: bool = field(default=False, metadata=ONLY_IF_SET)
    attention_output_gate: bool = field(default=False, metadata=ONLY_IF_SET)
    q_lora_rank: int = field(default=0, metadata=ONLY_IF_SET)
    kv_lora_rank: int = field(default=0, metadata=ONLY_IF_SET)
    qk_head_dim: int = field(default=0, metadata=ONLY_IF_SET)
    qk_pos_emb_head_dim: int = field(default=0, metadata=ONLY_IF_SET)
    v_head_dim: int = field(default=0, metadata=ONLY_IF_SET)
    learns_softmax_offset: bool = field(default=False, metadata=ONLY_IF_SET)
    divides_latents: bool = field(default=False, metadata=ONLY_IF_SET)
    mtp_num_layers: int = field(default=0, metadata=ONLY_IF_SET)

    @property
    def norm_vectors(self) -> int:
        """Return how many vectors a norm has: LayerNorm weights and biases, RMSNorm weights."""
        return 2 if self.normalization == "LayerNorm" else 1

    @property
    def is_rotary(self) -> bool:
        """Return whether queries and keys are rotated by position."""
        return self.position_embedding in ("rope", "yarn")

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Return the channels of a head's query, and of its value."""
        if self.kv_lora_rank:
            return self.qk_head_dim + self.qk_pos_emb_head_dim, self.v_head_dim
        return self.kv_channels, self.kv_channels

    @property
    def copies_words(self) -> bool:
        """Return whether last stages have a copy of the word embedding: as their output layer, or
        to predict further tokens."""
        return self.tied_embeddings or bool(self.mtp_num_layers)

    @property
    def mlp_columns(self) -> int:
        """Return the columns of every layer's MLP, or of each expert: the part that a
        tensor-parallel group divides."""
        return self.moe_ffn_hidden_size if self.num_experts else self.ffn_hidden_size

    @property
    def dense_columns(self) -> int:
        """Return the columns of the dense layers among layers with experts; 0 without such."""
        return self.ffn_hidden_size if self.moe_layer_freq else 0

    @property
    def column_kinds(self) -> tuple[int, ...]:
        """Return the columns of each kind of MLP in the model; a group divides the columns of every
        kind."""
        kinds = self.mlp_columns, self.moe_shared_expert_intermediate_size, self.dense_columns
        return tuple(dict.fromkeys(size for size in kinds if size))

    @property
    def divided_latents(self) -> tuple[int, ...]:
        """Return the widths of latents that a group divides evenly, under any shares."""
        if not self.divides_latents:
            return ()
        sizes = self.q_lora_rank, self.kv_lora_rank + self.qk_pos_emb_head_dim
        return tuple(size for size in sizes if size)

    @cached_property
    def kinds(self) -> tuple[ModelSpec, ...]:
        """Return the model with experts in all layers, and with them in none; empty where all
        layers are alike."""
        if not self.moe_layer_freq:
            return ()
        # Layers of each kind are models of their own, in which all layers are alike.
        sparse = replace(self, moe_layer_freq=())
        dense = replace(
            sparse,
            num_experts=0,
            moe_router_topk=0,
            moe_ffn_hidden_size=0,
            moe_shared_expert_intermediate_size=0,
            moe_shared_expert_gate=False,
        )
        return sparse, dense

    @property
    def least(self) -> ModelSpec:
        """Return a model of equal layers that need no more of anything than any layer of this
        model: lower bounds are computed for it.  The model itself where all layers are alike."""
        if not self.kinds:
            return self
        _, dense = self.kinds
        # A layer with experts multiplies a token with its chosen experts alone.
        active = self.moe_router_topk * self.moe_ffn_hidden_size
        # Every width that divides both kinds divides this too.
        unit = math.gcd(self.ffn_hidden_size, self.moe_ffn_hidden_size)
        columns = min(self.ffn_hidden_size, active) // unit * unit
        # Without experts the least model has no router either, which every sparse layer has on top.
        return replace(dense, ffn_hidden_size=columns)

    def kind_counts(self, first_layer: int, num_layers: int) -> tuple[int, ...]:
        """Count the layers of each of `kinds` in a run of layers."""
        # `moe_layer_freq` has a 1 for each layer with experts, so the sum counts these.
        sparse = sum(self.moe_layer_freq[first_layer : first_layer + num_layers])
        return sparse, num_layers - sparse

    def kind_of(self, layer: int) -> int:
        """Return which of `kinds` a layer is; 0 where all layers are alike."""
        return 1 - self.moe_layer_freq[layer] if self.moe_layer_freq else 0

    def of_layer(self, layer: int) -> ModelSpec:
        """Return a model all of whose layers are like number `layer`."""
        return self.kinds[self.kind_of(layer)] if self.kinds else self


@hashed_once
@dataclass(frozen=True)
class Workload:
    """Model, training, and the user's Megatron flags from which both were read.

    `megatron_args` is the user's argument vector without any flag that the plan decides (TP, PP,
    layout): `flags` prints it back.  `source` says where it was read, for people.  `unread` is what
    only running the script would tell; `exports` are the variables that it sets for the libraries
    of the job (NCCL, gloo and the like), as NAME=VALUE.
    """

    model: ModelSpec
    training: TrainingSpec
    megatron_args: tuple[str, ...]
    source: str
    unread: tuple[Unread, ...] = ()
    exports: tuple[str, ...] = ()

    @property
    def unread_flags(self) -> tuple[str, ...]:
        """Return the flags of the script whose values no plan has."""
        return tuple(part.name for part in self.unread if part.name.startswith("--"))
