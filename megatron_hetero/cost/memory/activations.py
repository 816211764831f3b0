"""Bytes kept on a device from forward to backward for one micro-batch, tensor by tensor.

The formulas are those of Korthikanti et al. 2022 ("Reducing Activation Recomputation in Large
Transformer Models", eq. 1-5), generalised to grouped queries, gated MLPs, uneven shares, any
element size and dropout that is off, and checked against what autograd keeps in Megatron's local
layers (`tests/runtime/test_memory.py`).  What Megatron's fused kernels do not keep is left out
where the job uses them: the scores under flash attention, the inner tensors of a fused activation.
"""

from __future__ import annotations

from megatron_hetero.cost.memory.mlp import mlp_activation_bytes
from megatron_hetero.cost.parameters import attention_sizes
from megatron_hetero.cost.share import TensorShare
from megatron_hetero.model.recompute import WITH_SHARED_EXPERT, norms_again, recomputed
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec

_STATISTIC_BYTES = 4


def layer_activation_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool, recompute: str
) -> int:
    """Count the bytes that a decoder layer keeps for backward.

    With 16-bit elements, dropout, no recomputation, no flash attention and a 4h MLP this is
    s b h (10 + 24/t + 5 a s / (h t)), or s b h (34 + 5 a s / h) / t with sequence parallelism, and
    the statistics of two norms.

    Args:
        share: the device's part of its tensor-parallel group.
        flash: attention is fused.
        recompute: Megatron's granularity: none, selective or full.
    """
    own_tokens = share.own_tokens(model, training)
    residual = training.residual_bytes
    # Full recompute keeps the layer's input alone.
    if recompute == "full":
        return own_tokens * model.hidden_size * residual
    # Input of both norms, and a mask byte after each of the two dropouts.
    kept_of_norms = 2 * residual + (2 if training.hidden_dropout else 0)
    parts = part_activation_bytes(model, training, share, flash, recomputed(training, recompute))
    return own_tokens * model.hidden_size * kept_of_norms + sum(parts)


def part_activation_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool, again: frozenset[str]
) -> tuple[int, int]:
    """Count the bytes that attention and the MLP of a layer keep, each with the norm before it, but
    for the norm's input.

    Args:
        share: the device's part of its tensor-parallel group.
        flash: attention is fused.
        again: modules that are computed again (`model.recompute`).
    """
    norms = _bytes_behind_norms(model, training, share, again)
    attention = _kept_by_latent_attention if model.kv_lora_rank else _kept_by_attention
    mlp = mlp_activation_bytes(model, training, share, again)
    return norms[0] + attention(model, training, share, flash, again), norms[1] + mlp


def _bytes_behind_norms(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, again: frozenset[str]
) -> tuple[int, int]:
    """Count what is kept behind the norm before attention, and before the MLP: in fp8 what the
    products there have cast; and statistics."""
    element, cast = training.element_bytes, training.product_input_bytes
    before_attention: float = element
    before_mlp: float = element
    if training.fp8:
        # Both down-projections of latent attention cast their input.
        before_attention = 2 * cast if model.kv_lora_rank else cast
        before_mlp = cast
    if training.fp8 and model.num_experts:
        # A router keeps its input as it is, and a shared expert beside it another cast with the
        # recipe that cannot cast again (`set_save_original_input`).
        is_shared = model.moe_shared_expert_intermediate_size and not again & WITH_SHARED_EXPERT
        before_mlp = element + (cast if is_shared and training.fp8_recipe == "delayed" else 0)
    # A checkpoint keeps its input: with Transformer Engine's dense MLP the norm is within.
    is_within = "mlp" in again and not (training.local_layers or model.num_experts)
    first, second = norms_again(model, training, again)
    rows, statistics = share.own_tokens(model, training), norm_statistics(model)
    each = [
        0 if dropped else int(rows * model.hidden_size * kept) + rows * statistics
        for kept, dropped in ((before_attention, first), (before_mlp, second or is_within))
    ]
    return each[0], each[1]


def _cast_context_bytes(training: TrainingSpec) -> float:
    """Return the bytes that the output projection keeps of an element of the context beside what
    attention keeps: `delayed` alone does not cast it again (`set_save_original_input`)."""
    return 1 if training.fp8 and training.fp8_recipe == "delayed" else 0


def score_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool) -> int:
    """Return the bytes of one tensor of attention scores; none where attention stores no scores."""
    if not share.stores_scores(training, flash):
        return 0
    # One score for each of the member's heads, own row and column of the whole sequence.
    num_heads = share.query_groups * (model.num_attention_heads // model.num_query_groups)
    scores = share.num_tokens(model, training) * num_heads * model.seq_length
    return scores * training.element_bytes


def _kept_by_attention(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool, again: frozenset[str]
) -> int:
    """Count the bytes of queries, keys, values and context, and of the scores or their substitute.
    """
    element = training.element_bytes
    tokens = share.num_tokens(model, training)
    query, key_value = attention_sizes(model, share)
    num_heads = query // model.kv_channels
    grouped = key_value < query
    rotary = model.is_rotary
    # Queries, keys and values, their product, and the context.
    elements = 2 * query + 2 * key_value
    if not flash:
        if grouped and "core_attn" not in again and share.stores_scores(training, flash):
            # The local attention repeats keys and values for every head of their group.
            elements = 4 * query
        elif rotary:
            # Rotated queries and keys are new; the values hold on to the product they are part of.
            elements += query + key_value
    # Norms of queries and keys keep their inputs, which are not what attention keeps.
    normalised = query + key_value if model.qk_layernorm else 0
    gathers = not flash and share.context_parallel > 1 and "core_attn" not in again
    if gathers:
        # Own keys and values are copied; the product that they are part of stays where the queries
        # are a part of it, or the norms have them as their input.
        keeps_product = model.qk_layernorm or not (grouped or rotary)
        elements = 2 * query + (2 * key_value if keeps_product else 0)
        if not share.stores_scores(training, flash):
            # The context once more: of each run of rows, and of all together.
            elements += query
        normalised = query if model.qk_layernorm else 0
    if model.attention_output_gate:
        # The gate, a copy of it for its sigmoid in fp32 and that, and the gated context.
        elements += query
        gate = tokens * query * (0 if element == 4 else 4) + tokens * query * 4
    else:
        gate = 0
    kept = tokens * element * (elements + normalised) + gate
    kept += int(tokens * query * _cast_context_bytes(training))
    if gathers:
        kept += _gathered_bytes(model, training, share, flash)
    if rotary and not flash:
        # Cosines and sines, for the queries and for the keys; the same for all sequences.
        kept += 4 * share.sequence_tokens(model) * model.kv_channels * element
    if model.qk_layernorm:
        kept += tokens * (num_heads + key_value // model.kv_channels) * norm_statistics(model)
    # Recompute of the core drops the scores.
    if "core_attn" in again:
        return kept
    if not share.stores_scores(training, flash):
        return kept + _STATISTIC_BYTES * tokens * num_heads  # log-sum-exp of each row
    scores = tokens * num_heads * model.seq_length
    # The softmax; with dropout what it leaves, and its mask.
    return kept + scores * (2 * element + 1 if training.attention_dropout else element)


def _kept_by_latent_attention(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool, again: frozenset[str]
) -> int:
    """Count the bytes kept by multi-latent attention: latents, what they are projected up to, the
    queries and keys put together of rotated and plain parts, values, context and scores."""
    element = training.element_bytes
    tokens, own_tokens = share.num_tokens(model, training), share.own_tokens(model, training)
    heads = share.query_groups
    query, value = attention_sizes(model, share)
    latents = model.q_lora_rank + model.kv_lora_rank
    # Latents, with the rotary keys beside those of keys and values: a group that divides them
    # gathers them for the whole sequence.  Their norms keep what they make of them as well.
    of_latents = tokens if model.divides_latents else own_tokens
    kept = of_latents * element * (latents + model.qk_pos_emb_head_dim)
    is_projected_again = "mla_up_proj" in again
    # Transformer Engine has these norms in the up-projections.
    if model.qk_layernorm and (training.local_layers or not is_projected_again):
        kept += int(own_tokens * training.product_input_bytes * latents)
        num_norms = 2 if model.q_lora_rank else 1
        kept += own_tokens * num_norms * norm_statistics(model)
    # Rotated and plain parts are put together anew, so queries, keys, values and context are new.
    # The context alone is no work of the up-projections, which keep what goes in: latents, and the
    # gathered rotary keys.
    if is_projected_again:
        is_gathered = share.width > 1 and training.sequence_parallel
        kept += tokens * element * (value + is_gathered * model.qk_pos_emb_head_dim)
    else:
        kept += tokens * element * (2 * query + 2 * value)
    kept += int(tokens * value * _cast_context_bytes(training))
    if not (flash or is_projected_again):
        # Cosines and sines of the rotary part.
        kept += 4 * model.seq_length * model.qk_pos_emb_head_dim * element
    if "core_attn" in again:
        return kept
    if flash:
        return kept + _STATISTIC_BYTES * tokens * heads
    # Unfused attention keeps the softmax, and with dropout the result and a mask byte.
    scores = tokens * heads * model.seq_length
    return kept + scores * (2 * element + 1 if training.attention_dropout else element)


def _gathered_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool
) -> int:
    """Count the bytes of keys and values of whole sequences, and of their order
    (`runtime.parallel.context_attention`).

    Where scores are stored, keys and values are repeated for every head of their group, and every
    layer has a mask of the own rows for itself.
    """
    query, key_value = attention_sizes(model, share)
    is_stored = share.stores_scores(training, flash)
    elements = query if is_stored and key_value < query else key_value
    # Keys and values of all ranks; the order of rows is one 8-byte number for each of the sequence.
    tokens = training.micro_batch_size * model.seq_length
    mask = share.sequence_tokens(model) * model.seq_length if is_stored else 0
    return 2 * tokens * elements * training.element_bytes + 8 * model.seq_length + mask


def norm_statistics(model: ModelSpec) -> int:
    """Count the bytes that a norm keeps for each row: mean and reciprocal deviation, or the latter
    alone."""
    return _STATISTIC_BYTES * (2 if model.normalization == "LayerNorm" else 1)


def mask_bytes(model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool) -> int:
    """Count the bytes of the causal mask that comes with a micro-batch on a first and a last stage;
    unfused attention keeps a byte for each pair of tokens.

    With context parallelism it is an input of what is recomputed, and nothing else.

    Args:
        share: the device's part of its tensor-parallel group.
        flash: attention is fused, which needs no mask.
    """
    is_gathered = share.context_parallel > 1 and "core_attn" not in recomputed(training)
    if is_gathered or not share.stores_scores(training, flash):
        return 0
    return share.sequence_tokens(model) * model.seq_length


def own_mask_bytes(
    model: ModelSpec, training: TrainingSpec, share: TensorShare, flash: bool
) -> int:
    """Count the bytes of each layer's own attention mask on a stage without a batch, kept unless
    recomputed (with context parallelism see `_gathered_bytes`).

    Args:
        share: the device's part of its tensor-parallel group.
        flash: attention is fused, which needs no mask.
    """
    is_made_again = share.context_parallel > 1 or "core_attn" in recomputed(training)
    if is_made_again or not share.stores_scores(training, flash):
        return 0
    return model.seq_length**2
