"""Bytes that Megatron allocates on one device of a stage, part by part.

Weights and optimizer states follow the parameter shards; activations follow Korthikanti et al.
2022 ("Reducing Activation Recomputation in Large Transformer Models", eq. 1-5), generalised to
grouped queries, gated MLPs and any element size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_hetero.cluster.spec import GpuType
from megatron_hetero.cost.compute import ELEMENT_BYTES, uses_flash_attention
from megatron_hetero.model.spec import ModelSpec, TrainingSpec, Workload


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter: weight, gradient buffer, and what the optimizer keeps beside them."""

    weight: int
    gradient: int
    optimizer: int

    @property
    def total(self) -> int:
        """All bytes that one parameter takes on its device."""
        return self.weight + self.gradient + self.optimizer


def state_bytes(training: TrainingSpec) -> StateBytes:
    """bf16 accumulates gradients in fp32 (2 + 4 + 12); fp16 in fp16, with an fp32 copy during the
    step (2 + 2 + 16); fp32 has no second copy of the weights (4 + 4 + 8).  SGD keeps one moment."""
    moments = 8 if training.optimizer == "adam" else 4
    match training.precision:
        case "bf16":
            return StateBytes(2, 4, 4 + moments)
        case "fp16":
            return StateBytes(2, 2, 4 + 4 + moments)
        case "fp32":
            return StateBytes(4, 4, moments)


def layer_params(model: ModelSpec, width: int) -> int:
    """Parameters of one decoder layer on one rank of a group of `width` (its shard, plus what
    every rank holds whole: norms and the biases added after the row-parallel products)."""
    hidden, ffn, channels = model.hidden_size, model.ffn_hidden_size, model.kv_channels
    query = model.num_attention_heads * channels
    query_key_value = query + 2 * model.num_query_groups * channels
    first = ffn * (2 if model.gated_mlp else 1)
    norm_vectors = 2 if model.normalization == "LayerNorm" else 1
    sharded = hidden * query_key_value + query * hidden + hidden * first + ffn * hidden
    whole = 2 * norm_vectors * hidden
    if model.add_bias_linear or model.add_qkv_bias:
        sharded += query_key_value
    if model.add_bias_linear:
        sharded += first
        whole += 2 * hidden
    if model.qk_layernorm:
        whole += 2 * norm_vectors * channels
    return sharded // width + whole


def embedding_params(model: ModelSpec, width: int, vocab_rows: int) -> int:
    """Word embedding's shard and the learned positions, which every rank holds whole."""
    positions = (
        model.max_position_embeddings * model.hidden_size
        if model.position_embedding == "learned_absolute"
        else 0
    )
    return vocab_rows * model.hidden_size // width + positions


def head_params(model: ModelSpec, width: int, vocab_rows: int, holds_embedding: bool) -> int:
    """Final norm and output weight; a tied weight on the embedding's own stage costs nothing."""
    norm = model.hidden_size * (2 if model.normalization == "LayerNorm" else 1)
    if model.tied_embeddings and holds_embedding:
        return norm
    return norm + vocab_rows * model.hidden_size // width


def stage_params(
    model: ModelSpec, width: int, num_layers: int, first: bool, last: bool, vocab_rows: int
) -> int:
    """Parameters on one rank of a stage."""
    params = num_layers * layer_params(model, width)
    if first:
        params += embedding_params(model, width, vocab_rows)
    if last:
        params += head_params(model, width, vocab_rows, holds_embedding=first)
    return params


def layer_activation_bytes(
    model: ModelSpec, training: TrainingSpec, width: int, flash: bool, recompute: str
) -> int:
    """Bytes that one layer keeps from forward to backward for one micro-batch, on one rank.

    With 16-bit elements, no recomputation, no flash attention and a 4h MLP this is
    s b h (10 + 24/t + 5 a s / (h t)), or s b h (34 + 5 a s / h) / t with sequence parallelism.
    """
    element = ELEMENT_BYTES[training.precision]
    tokens = training.micro_batch_size * model.seq_length
    hidden = model.hidden_size
    norm_width = width if training.sequence_parallel else 1
    if recompute == "full":
        return tokens * hidden * element // norm_width
    query = model.num_attention_heads * model.kv_channels
    query_key_value = query + 2 * model.num_query_groups * model.kv_channels
    first = model.ffn_hidden_size * (2 if model.gated_mlp else 1)
    # Both norms' inputs and outputs, and a mask byte after each of the two dropouts.
    whole = tokens * hidden * (4 * element + 2)
    sharded = tokens * element * (query_key_value + query + first + model.ffn_hidden_size)
    scores = training.micro_batch_size * model.num_attention_heads * model.seq_length**2
    if flash:
        sharded += 4 * tokens * model.num_attention_heads  # log-sum-exp of each row, fp32
    elif recompute == "none":
        sharded += scores * (2 * element + 1)  # softmax, dropout's output and its mask
    return whole // norm_width + sharded // width


@dataclass(frozen=True)
class StageMemory:
    """Bytes on one device of a stage: `base_bytes` without any layer, and what each layer adds.

    Both are split by cause; keys are those of `plan.DeviceEstimate.parts_bytes`.
    """

    base: Mapping[str, int]
    per_layer: Mapping[str, int]
    capacity_bytes: int

    def parts_bytes(self, num_layers: int) -> dict[str, int]:
        """Bytes by cause with `num_layers` layers."""
        return {part: self.base[part] + num_layers * self.per_layer[part] for part in self.base}

    def peak_bytes(self, num_layers: int) -> int:
        """Sum of all parts with `num_layers` layers."""
        return sum(self.base.values()) + num_layers * sum(self.per_layer.values())

    @property
    def max_layers(self) -> int:
        """Layers that fit; negative when even the base does not."""
        return (self.capacity_bytes - sum(self.base.values())) // sum(self.per_layer.values())


def stage_memory(
    workload: Workload,
    gpu: GpuType,
    width: int,
    *,
    first: bool,
    last: bool,
    num_in_flight: int,
    vocab_rows: int,
    reserve_bytes: int,
    num_sends_kept: int | None = None,
) -> StageMemory:
    """Memory of one device of a stage that keeps `num_in_flight` micro-batches for backward.

    `num_sends_kept`: tensors kept because they may still be under way to a neighbour; None is one
    for each neighbour, as in stock Megatron.
    """
    model, training = workload.model, workload.training
    element = ELEMENT_BYTES[training.precision]
    states = state_bytes(training)
    flash = uses_flash_attention(training, gpu)
    tokens = training.micro_batch_size * model.seq_length
    boundary = tokens * model.hidden_size * element
    boundary //= width if training.sequence_parallel else 1
    num_hops = (not first) + (not last)
    num_sends_kept = num_hops if num_sends_kept is None else num_sends_kept
    base_params = stage_params(model, width, 0, first, last, vocab_rows)
    layer = layer_params(model, width)
    activations = 0
    if first:  # token and position ids, and the dropout mask of the embedding
        activations += num_in_flight * tokens * (2 * 8 + model.hidden_size)
    if last:  # norm and product inputs; logits, their fp32 copy and their gradient: one at a time
        activations += 2 * tokens * model.hidden_size * element
        activations += tokens * vocab_rows // width * (2 * element + 4)
    base = {
        "weights": base_params * states.weight,
        "gradients": base_params * states.gradient,
        "optimizer": base_params * states.optimizer,
        "activations": activations,
        "buffers": (num_hops + num_sends_kept) * boundary
        + _working_bytes(model, training, width, flash),
        "reserve": reserve_bytes,
    }
    kept = layer_activation_bytes(model, training, width, flash, training.recompute)
    per_layer = {
        "weights": layer * states.weight,
        "gradients": layer * states.gradient,
        "optimizer": layer * states.optimizer,
        "activations": num_in_flight * kept,
        "buffers": 0,
        "reserve": 0,
    }
    return StageMemory(base, per_layer, gpu.memory_bytes)


def _working_bytes(model: ModelSpec, training: TrainingSpec, width: int, flash: bool) -> int:
    """Working set of one layer's backward: gradients of its widest activations, and all it
    recomputes."""
    element = ELEMENT_BYTES[training.precision]
    tokens = training.micro_batch_size * model.seq_length
    widest = model.ffn_hidden_size * (2 if model.gated_mlp else 1) + model.ffn_hidden_size
    working = tokens * element * (widest // width + 2 * model.hidden_size)
    if not flash:
        scores = training.micro_batch_size * model.num_attention_heads * model.seq_length**2
        working = max(working, 2 * scores * element // width)
    if training.recompute != "none":
        working += layer_activation_bytes(model, training, width, flash, "none")
        working -= layer_activation_bytes(model, training, width, flash, training.recompute)
    return working
