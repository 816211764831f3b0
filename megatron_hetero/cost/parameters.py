"""Parameters on a device of a stage, exactly as in Megatron's GPTModel."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

from megatron_hetero.cost.share import TensorShare, even_share
from megatron_hetero.model.blocks import (
    joining_params,
    norm_parameters,
    router_params,
    whole_latent_params,
)
from megatron_hetero.model.spec import ModelSpec


@lru_cache(maxsize=4096)
def layer_params(model: ModelSpec, share: TensorShare) -> int:
    """Count the parameters of a decoder layer on a member of a group: its shard, and the parameters
    held whole by every member (norms, and the biases added after the row-parallel products).

    Of layers of unlike kinds it is the mean, rounded up.
    """
    if model.kinds:
        return mean_of_kinds(model, lambda kind, i: layer_params(kind, share.of_kind(i)))
    sharded = matrix_params(model, share) - whole_latent_params(model)
    # Biases of the column-parallel products; latent attention has none.
    if not model.kv_lora_rank and (model.add_bias_linear or model.add_qkv_bias):
        sharded += query_key_value_size(model, share)
    if model.add_bias_linear:
        sharded += (share.num_experts(model) or 1) * _first_columns(model, share)
    # One offset for each of the member's heads.
    if model.learns_softmax_offset:
        sharded += share.query_groups * (model.num_attention_heads // model.num_query_groups)
    return sharded + whole_layer_params(model)


@lru_cache(maxsize=4096)
def matrix_params(model: ModelSpec, share: TensorShare) -> int:
    """Count the elements of a decoder layer's matrices on a member: of attention, MLP or experts,
    and shared expert, which are what Transformer Engine multiplies in fp8.  All else of a layer is
    norms, biases and routers.

    Of layers of unlike kinds it is the mean, rounded up.
    """
    if model.kinds:
        return mean_of_kinds(model, lambda kind, i: matrix_params(kind, share.of_kind(i)))
    num_mlps = share.num_experts(model) or 1
    mlps = num_mlps * (_first_columns(model, share) + share.mlp_columns) * model.hidden_size
    shared = sum(shared_expert_matrices(model, share))
    return sum(attention_matrices(model, share)) + mlps + shared


def _first_columns(model: ModelSpec, share: TensorShare) -> int:
    """Return the columns of an MLP's first product, or an expert's: a gated one has two halves."""
    return share.mlp_columns * (2 if model.gated_mlp else 1)


def expert_params(model: ModelSpec, share: TensorShare) -> int:
    """Count the parameters of a layer's routed experts on a member; experts dealt out over replicas
    lie on other ranks than the rest of the layer."""
    # Two matrices for each expert, and the biases of both products.
    first = _first_columns(model, share)
    biases = first + model.hidden_size if model.add_bias_linear else 0
    each = model.hidden_size * (first + share.mlp_columns) + biases
    return share.num_experts(model) * each


def mean_of_kinds(model: ModelSpec, number: Callable[[ModelSpec, int], int]) -> int:
    """Return the mean over all layers of a number of each kind of layer, rounded up.

    Args:
        number: of a kind of layer, and the index of the kind.
    """
    counts = model.kind_counts(0, model.num_layers)
    total = sum(
        n * number(kind, i) for i, (n, kind) in enumerate(zip(counts, model.kinds, strict=True))
    )
    return -(-total // model.num_layers)


def routed_params(model: ModelSpec) -> int:
    """Count the parameters of the routed experts of a layer, the mean of layers of unlike kinds."""
    if model.kinds:
        return mean_of_kinds(model, lambda kind, _: routed_params(kind))
    return expert_params(model, even_share(model, 1)) if model.num_experts else 0


def routed_matrix_params(model: ModelSpec) -> int:
    """Count the elements of the matrices of a layer's routed experts, as `routed_params`."""
    if model.kinds:
        return mean_of_kinds(model, lambda kind, _: routed_matrix_params(kind))
    if not model.num_experts:
        return 0
    share = even_share(model, 1)
    columns = _first_columns(model, share) + share.mlp_columns
    return model.num_experts * columns * model.hidden_size


def attention_matrices(model: ModelSpec, share: TensorShare) -> tuple[int, ...]:
    """Count the elements of the matrices of one attention on a member, in the order of the forward
    pass."""
    hidden = model.hidden_size
    if not model.kv_lora_rank:
        query, _ = attention_sizes(model, share)
        return hidden * query_key_value_size(model, share), query * hidden
    # Latent attention: `query_groups` are heads, and latents may be divided or whole.
    heads, divisor = share.query_groups, share.width if model.divides_latents else 1
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    latents = model.kv_lora_rank + model.qk_pos_emb_head_dim
    queries: tuple[int, ...] = (hidden * query,)
    # Queries have a latent of their own, or are projected at once.
    if model.q_lora_rank:
        queries = hidden * model.q_lora_rank // divisor, model.q_lora_rank * query
    return (
        *queries,
        hidden * latents // divisor,
        model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim),
        heads * model.v_head_dim * hidden,
    )


def attention_inputs(model: ModelSpec, share: TensorShare) -> tuple[int, ...]:
    """Return the inputs of each of the `attention_matrices`."""
    if not model.kv_lora_rank:
        return model.hidden_size, attention_sizes(model, share)[0]
    queries = (model.hidden_size, model.q_lora_rank) if model.q_lora_rank else (model.hidden_size,)
    values = share.query_groups * model.v_head_dim
    return *queries, model.hidden_size, model.kv_lora_rank, values


def shared_expert_matrices(model: ModelSpec, share: TensorShare) -> tuple[int, ...]:
    """Count the elements of the two matrices of the shared expert on a member; none without one."""
    columns = share.shared_columns
    if not columns:
        return ()
    first = columns * (2 if model.gated_mlp else 1)
    return model.hidden_size * first, columns * model.hidden_size


def whole_layer_params(model: ModelSpec) -> int:
    """Count the parameters of a decoder layer that every member of a group holds whole."""
    if model.kinds:
        return mean_of_kinds(model, lambda kind, _: whole_layer_params(kind))
    whole = 2 * norm_parameters(model) + router_params(model)
    whole += whole_latent_params(model)
    # Biases of the row-parallel products, added once after their sum, on every member.
    if model.add_bias_linear:
        whole += (1 + (model.num_experts or 1)) * model.hidden_size
    if model.qk_layernorm:
        latents = model.q_lora_rank + model.kv_lora_rank
        whole += norm_parameters(model, latents if model.kv_lora_rank else 2 * model.kv_channels)
    return whole


def query_key_value_size(model: ModelSpec, share: TensorShare) -> int:
    """Return the width of a member's queries, keys and values, and of the gate of its output."""
    query, key_value = attention_sizes(model, share)
    return query * (2 if model.attention_output_gate else 1) + 2 * key_value


def attention_sizes(model: ModelSpec, share: TensorShare) -> tuple[int, int]:
    """Return the width of a member's queries, and of its keys (or values); of latent attention,
    which has as many of both, the width of the queries and of the values."""
    if model.kv_lora_rank:
        query = model.qk_head_dim + model.qk_pos_emb_head_dim
        return share.query_groups * query, share.query_groups * model.v_head_dim
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
    """Count the parameters of a member's rows of a matrix over the padded vocabulary, divided
    evenly."""
    return vocab_rows * model.hidden_size // width


def head_params(model: ModelSpec, width: int, vocab_rows: int, holds_embedding: bool) -> int:
    """Count the parameters of the final norm and the output weight; a tied weight on the
    embedding's own stage costs nothing.

    Args:
        width: of the tensor-parallel group.
        vocab_rows: rows of the padded vocabulary.
        holds_embedding: the stage holds the word embedding too.
    """
    norm = norm_parameters(model)
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
    # Layers first, then the ends that the stage holds.
    params = num_layers * layer_params(model, share)
    if first:
        params += embedding_params(model, share.width, vocab_rows)
    if last:
        params += head_params(model, share.width, vocab_rows, holds_embedding=first)
        params += further_params(model, share)
        if model.mtp_num_layers and not first:
            # Words of a tied output layer are there already.
            params += embedding_params(
                model, share.width, 0 if model.tied_embeddings else vocab_rows
            )
    return params


def _last_layer(model: ModelSpec, share: TensorShare) -> tuple[ModelSpec, TensorShare]:
    """Return the kind of the model's last layer, which the layers that predict further tokens are
    of."""
    last = model.num_layers - 1
    own = share.of_kind(model.kind_of(last)) if model.kinds else share
    return model.of_layer(last), own


def further_params(model: ModelSpec, share: TensorShare) -> int:
    """Count the parameters of the layers that predict further tokens, without embeddings."""
    if not model.mtp_num_layers:
        return 0
    layer = layer_params(*_last_layer(model, share))
    # Norms of the embedding, of the hidden states, and after the layer.
    norms = 3 * norm_parameters(model)
    return model.mtp_num_layers * (layer + norms + joining_params(model) // share.width)


def stage_matrix_params(model: ModelSpec, share: TensorShare, num_layers: int, last: bool) -> int:
    """Count the elements of the matrices of a stage's layers on a member, as `stage_params`."""
    params = num_layers * matrix_params(model, share)
    return params + (further_matrix_params(model, share) if last else 0)


def further_matrix_params(model: ModelSpec, share: TensorShare) -> int:
    """Count the elements of the matrices of the layers that predict further tokens."""
    if not model.mtp_num_layers:
        return 0
    layer = matrix_params(*_last_layer(model, share))
    return model.mtp_num_layers * (layer + joining_params(model) // share.width)
