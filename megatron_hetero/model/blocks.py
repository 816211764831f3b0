"""The model as a list of blocks, each with its parameters and forward FLOPs.

Parameter counts are exact: they equal those of Megatron's GPTModel (`tests/model/test_blocks.py`).
FLOPs count a multiply-add as two; matrix products and attention scores are kept apart because they
run at different rates.  Backward is twice the forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from megatron_hetero.model.spec import ModelSpec, Workload


@dataclass(frozen=True)
class Block:
    """An indivisible part of the model: it stays within one stage.

    `num_replicated_parameters` of `num_parameters` are held by every rank of a tensor-parallel
    group (norms, biases of row-parallel products, position embeddings, router); the rest is
    divided.  FLOPs are of the forward pass of one sequence; `attention_flops_forward` counts the
    causal half of the score matrix, which is what flash attention computes (unfused attention
    computes twice that).
    """

    name: str
    kind: Literal["embedding", "layer", "head"]
    num_parameters: int
    num_replicated_parameters: int
    matmul_flops_forward: float
    attention_flops_forward: float


@lru_cache(maxsize=16)
def blocks(workload: Workload, tensor_parallel_widths: tuple[int, ...] = (1,)) -> tuple[Block, ...]:
    """Return embedding, `num_layers` decoder layers, head (final norm and output layer).

    Args:
        tensor_parallel_widths: every width in use, which decides the padding of the vocabulary.
    """
    model = workload.model
    vocab_size = padded_vocab_size(model, tensor_parallel_widths)
    # Models have two kinds of layers at most, so each kind is computed once.
    layers = {kind: _layer(kind) for kind in model.kinds or (model,)}
    return (
        _embedding(model, vocab_size),
        *(replace(layers[model.of_layer(i)], name=f"layer {i}") for i in range(model.num_layers)),
        _head(model, vocab_size),
    )


def padded_vocab_size(model: ModelSpec, tensor_parallel_widths: Sequence[int] = (1,)) -> int:
    """Count the rows of the embedding: the vocabulary, padded so that every width divides it.

    With one width this is Megatron's `calculate_padded_vocab_size`.
    """
    multiple = model.make_vocab_size_divisible_by * math.lcm(*tensor_parallel_widths)
    # Rounded up to a multiple; the least common multiple serves all widths at once.
    return -(-model.vocab_size // multiple) * multiple


def num_parameters(workload: Workload, tensor_parallel_widths: Sequence[int] = (1,)) -> int:
    """Count the parameters of the whole model; a tied embedding counts once."""
    return sum(b.num_parameters for b in blocks(workload, tuple(tensor_parallel_widths)))


def _embedding(model: ModelSpec, vocab_size: int) -> Block:
    positions = 0
    if model.position_embedding == "learned_absolute":
        positions = model.max_position_embeddings * model.hidden_size
    return Block(
        "embedding", "embedding", vocab_size * model.hidden_size + positions, positions, 0.0, 0.0
    )


def _head(model: ModelSpec, vocab_size: int) -> Block:
    """Build the final norm and output layer, and the layers that predict further tokens; the
    weights of a tied output layer are the embedding's."""
    norm = norm_parameters(model)
    # A tied output layer has no weights of its own, but the same products.
    output = 0 if model.tied_embeddings else vocab_size * model.hidden_size
    flops = 2.0 * model.seq_length * vocab_size * model.hidden_size
    head = Block("head", "head", norm + output, norm, flops, 0.0)
    if not model.mtp_num_layers:
        return head
    # Megatron builds each such layer as the last decoder layer of the model.
    further = _layer(model.of_layer(model.num_layers - 1))
    # Three norms each: over the embedding, over the hidden state, and at the end.
    number, norms = model.mtp_num_layers, 3 * norm
    joined = joining_params(model)
    return replace(
        head,
        num_parameters=head.num_parameters + number * (further.num_parameters + joined + norms),
        num_replicated_parameters=norm + number * (further.num_replicated_parameters + norms),
        # Each costs a layer, a projection from twice the hidden size, and an output layer.
        matmul_flops_forward=flops
        + number * (further.matmul_flops_forward + flops + 2.0 * model.seq_length * joined),
        attention_flops_forward=number * further.attention_flops_forward,
    )


def joining_params(model: ModelSpec) -> int:
    """Count the weights that join a layer's output with the embedding of the next token, in a layer
    for multi-token prediction (Megatron's `eh_proj`)."""
    return 2 * model.hidden_size**2


def _layer(model: ModelSpec) -> Block:
    attention, attention_replicated = attention_parameters(model)
    mlp, mlp_replicated = mlp_parameters(model)
    # Two norms: before attention and before the MLP.
    norms = 2 * norm_parameters(model)
    # Scores and weighted values: 2 products of s x s x channels a head, half of it causal.
    attention_flops = float(model.seq_length**2 * sum(_score_sizes(model)))
    return Block(
        "layer",
        "layer",
        attention + mlp + norms,
        attention_replicated + mlp_replicated + norms,
        2.0 * model.seq_length * _matmul_weights(model),
        attention_flops,
    )


def _matmul_weights(model: ModelSpec) -> int:
    """Count the weights multiplied with each token in a layer."""
    weights = attention_weights(model)
    # Up and down, and the gate's.
    matrices = 3 if model.gated_mlp else 2
    if not model.num_experts:
        return weights + matrices * model.hidden_size * model.ffn_hidden_size
    # A token passes the experts chosen for it, the shared expert, and all columns of the router.
    columns = model.moe_router_topk * model.moe_ffn_hidden_size
    columns += model.moe_shared_expert_intermediate_size
    gates = model.num_experts + model.moe_shared_expert_gate
    return weights + model.hidden_size * (matrices * columns + gates)


def norm_parameters(model: ModelSpec, size: int | None = None) -> int:
    """Count the parameters of one norm over `size` (the hidden size) channels."""
    return (size or model.hidden_size) * model.norm_vectors


def attention_parameters(model: ModelSpec) -> tuple[int, int]:
    """Count the parameters of an attention, and the parameters replicated on every tensor-parallel
    rank."""
    num_parameters = attention_weights(model)
    num_replicated = 0
    if model.learns_softmax_offset:
        # The offsets of the softmax divide with the heads.
        num_parameters += model.num_attention_heads
    if not model.kv_lora_rank and (model.add_bias_linear or model.add_qkv_bias):
        # Biases of queries, keys and values divide with the heads; latent attention has none.
        num_parameters += _qkv_size(model)
    if model.add_bias_linear:
        # The bias behind the row-parallel output product is whole on every member.
        num_replicated += model.hidden_size
    if model.qk_layernorm and model.kv_lora_rank:
        # Latent attention has norms over its latents, plain attention over the channels of a head.
        num_replicated += norm_parameters(model, model.q_lora_rank + model.kv_lora_rank)
    elif model.qk_layernorm:
        num_replicated += 2 * norm_parameters(model, model.kv_channels)
    return num_parameters + num_replicated, num_replicated + whole_latent_params(model)


def whole_latent_params(model: ModelSpec) -> int:
    """Count the elements of projections to latents that every member of a group holds whole."""
    if not model.kv_lora_rank or model.divides_latents:
        return 0
    latents = model.q_lora_rank + model.kv_lora_rank + model.qk_pos_emb_head_dim
    return model.hidden_size * latents


def attention_weights(model: ModelSpec) -> int:
    """Count the elements of the matrices of one attention."""
    # Queries, keys with values, and the output; grouped queries have fewer keys and values.
    if not model.kv_lora_rank:
        return model.hidden_size * (_qkv_size(model) + _query_size(model))
    heads = model.num_attention_heads
    query = heads * (model.qk_head_dim + model.qk_pos_emb_head_dim)
    queries = model.hidden_size * query
    # With latents, queries come from a product in two steps: down to the latents and up again.
    if model.q_lora_rank:
        queries = model.q_lora_rank * (model.hidden_size + query)
    # Keys and values share one latent; the rotary part of the keys goes beside the latent.
    down = model.hidden_size * (model.kv_lora_rank + model.qk_pos_emb_head_dim)
    up = model.kv_lora_rank * heads * (model.qk_head_dim + model.v_head_dim)
    return queries + down + up + heads * model.v_head_dim * model.hidden_size


def _score_sizes(model: ModelSpec) -> tuple[int, int]:
    """Return the widths of all heads' queries and values."""
    query, value = model.head_sizes
    return model.num_attention_heads * query, model.num_attention_heads * value


def divides_experts(model: ModelSpec, width: int) -> bool:
    """Return whether `width` ranks may divide each expert: not one with biases
    (`TransformerConfig.__post_init__` of Megatron-core 0.19).  True of models without experts."""
    return width == 1 or not (model.num_experts and model.add_bias_linear)


def router_params(model: ModelSpec) -> int:
    """Count the parameters of a layer's router and of the gate of the shared expert, held whole by
    every member of a group."""
    router = model.num_experts * (model.hidden_size + (1 if model.add_bias_linear else 0))
    return router + (model.hidden_size if model.moe_shared_expert_gate else 0)


def mlp_parameters(model: ModelSpec) -> tuple[int, int]:
    """Count the parameters of an MLP, or of all experts with the router, and the replicated
    parameters among them.

    An expert has the shape of a dense MLP of width `moe_ffn_hidden_size`.
    """
    ffn = model.mlp_columns
    # A gated MLP has the gate's columns beside those of the first product.
    fc1 = ffn * (2 if model.gated_mlp else 1)
    sharded = model.hidden_size * (fc1 + ffn) + (fc1 if model.add_bias_linear else 0)
    replicated = model.hidden_size if model.add_bias_linear else 0
    if not model.num_experts:
        return sharded + replicated, replicated
    router = router_params(model)
    shared = model.moe_shared_expert_intermediate_size * (3 if model.gated_mlp else 2)
    # Every expert has its own weights and biases; the shared expert has no biases.
    return (
        model.num_experts * (sharded + replicated) + router + shared * model.hidden_size,
        model.num_experts * replicated + router,
    )


def _query_size(model: ModelSpec) -> int:
    return model.num_attention_heads * model.kv_channels


def _qkv_size(model: ModelSpec) -> int:
    # A gate of the output is as wide as the queries, and comes from the same product.
    heads = model.num_attention_heads * (2 if model.attention_output_gate else 1)
    return (heads + 2 * model.num_query_groups) * model.kv_channels
