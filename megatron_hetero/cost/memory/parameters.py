"""Parameters on one device of a stage, exactly as Megatron's GPTModel has them."""

from __future__ import annotations

from functools import lru_cache

from megatron_hetero.cost.work.share import TensorShare
from megatron_hetero.model.spec import ModelSpec


@lru_cache(maxsize=4096)
def layer_params(model: ModelSpec, share: TensorShare) -> int:
    """Count the parameters of one decoder layer on one member of a group: its shard, and what every
    member holds whole (norms, and the biases added after the row-parallel products)."""
    hidden, columns = model.hidden_size, share.mlp_columns
    query, key_value = attention_sizes(model, share)
    query_key_value = query + 2 * key_value
    first = columns * (2 if model.gated_mlp else 1)
    num_mlps = model.num_experts or 1
    sharded = hidden * (query_key_value + query + num_mlps * (first + columns))
    if model.add_bias_linear or model.add_qkv_bias:
        sharded += query_key_value
    if model.add_bias_linear:
        sharded += num_mlps * first
    return sharded + whole_layer_params(model)


def whole_layer_params(model: ModelSpec) -> int:
    """Count the parameters of a decoder layer that every member of a group holds whole."""
    norm_vectors = 2 if model.normalization == "LayerNorm" else 1
    whole = 2 * norm_vectors * model.hidden_size + router_params(model)
    if model.add_bias_linear:
        whole += (1 + (model.num_experts or 1)) * model.hidden_size
    if model.qk_layernorm:
        whole += 2 * norm_vectors * model.kv_channels
    return whole


def router_params(model: ModelSpec) -> int:
    """Count the parameters that choose the experts of a layer; every member of a group holds them
    whole."""
    return model.num_experts * (model.hidden_size + (1 if model.add_bias_linear else 0))


def attention_sizes(model: ModelSpec, share: TensorShare) -> tuple[int, int]:
    """Return the width of a member's queries, and of its keys (or values)."""
    heads_per_group = model.num_attention_heads // model.num_query_groups
    key_value = share.query_groups * model.kv_channels
    return key_value * heads_per_group, key_value


def embedding_params(model: ModelSpec, width: int, vocab_rows: int) -> int:
    """Count the parameters of the word embedding's shard and of the learned positions, which every
    rank holds whole."""
    positions = (
        model.max_position_embeddings * model.hidden_size
        if model.position_embedding == "learned_absolute"
        else 0
    )
    return word_params(model, width, vocab_rows) + positions


def word_params(model: ModelSpec, width: int, vocab_rows: int) -> int:
    """Count the parameters of one member's rows of a matrix over the padded vocabulary, which
    divides evenly."""
    return vocab_rows * model.hidden_size // width


def head_params(model: ModelSpec, width: int, vocab_rows: int, holds_embedding: bool) -> int:
    """Count the parameters of the final norm and the output weight; a tied weight on the
    embedding's own stage costs nothing.

    Args:
        width: of the tensor-parallel group.
        vocab_rows: rows of the padded vocabulary.
        holds_embedding: the stage holds the word embedding too.
    """
    norm = model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)
    if model.tied_embeddings and holds_embedding:
        return norm
    return norm + word_params(model, width, vocab_rows)


def stage_params(
    model: ModelSpec, share: TensorShare, num_layers: int, first: bool, last: bool, vocab_rows: int
) -> int:
    """Count the parameters on one member of a stage.

    Args:
        share: the member's part of its tensor-parallel group.
        first, last: whether the stage holds the embedding, the head.
        vocab_rows: rows of the padded vocabulary.
    """
    params = num_layers * layer_params(model, share)
    if first:
        params += embedding_params(model, share.width, vocab_rows)
    if last:
        params += head_params(model, share.width, vocab_rows, holds_embedding=first)
    return params
