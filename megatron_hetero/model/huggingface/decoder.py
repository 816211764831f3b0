"""Llama and models built like Llama, by the properties of the family."""

from __future__ import annotations

from megatron_hetero.model.huggingface.config import DecoderConfig
from megatron_hetero.model.huggingface.experts import (
    few_experts,
    further_tokens,
    qwen_experts,
    routed_experts,
)
from megatron_hetero.model.huggingface.families import Family
from megatron_hetero.model.huggingface.positions import read_rotary, write_rotary
from megatron_hetero.model.huggingface.writer import FlagWriter, dropouts, layer_pattern, shape_of

_LAYER_TYPES = ("full_attention", "sliding_attention")


def write_decoder(writer: FlagWriter, config: DecoderConfig, family: Family) -> None:
    """Write the flags of a decoder.

    Raises:
        UnsupportedError: Megatron has no flag for a value.
    """
    # Sizes and heads.
    writer.require("hidden_act", config.hidden_act, *family.activations)
    num_groups = config.num_key_value_heads or config.num_attention_heads
    shape_of(writer, config)
    # Without the key a head has hidden_size / heads channels in both.
    if config.head_dim is not None:
        writer.add("head_dim", "--kv-channels", config.head_dim)
    # A number that the file may not have named is refused by the name of its key.
    usual = family.defaults.get("num_key_value_heads")
    if num_groups == usual and config.num_attention_heads % usual:
        writer.refuse(
            "num_key_value_heads",
            f"is {usual}, as in a file without the key, and does not divide num_attention_heads "
            f"{config.num_attention_heads}; add the key with the model's own number",
        )
    if num_groups != config.num_attention_heads:
        writer.add(
            "num_key_value_heads", "--group-query-attention", "--num-query-groups", num_groups
        )
    # The parts of a layer: MLP, norms, dropout.
    _write_mlp(writer, config, family)
    _write_norms(writer, config, family)
    dropouts(
        writer,
        ("attention_dropout", config.attention_dropout),
        ("hidden_dropout", config.hidden_dropout),
    )
    # Megatron has one dropout for both places.
    if config.embedding_dropout != config.hidden_dropout and (
        "embd_pdrop" in family.keys or "embedding_dropout" in family.keys
    ):
        writer.differ(
            f"dropout after the embedding is that of layers, {config.hidden_dropout}, not "
            f"{config.embedding_dropout}"
        )
    # Positions, windows and attention.
    write_rotary(writer, read_rotary(writer, config, family.rotary_share))
    writer.switch("model_type", "--rotary-interleaved", family.interleaved)
    _write_layers_without_rotation(writer, config, family)
    _write_windows(writer, config, family)
    has_bias = family.qkv_bias == "always" or (
        family.qkv_bias == "as said" and config.attention_bias
    )
    writer.switch("attention_bias", "--add-qkv-bias", has_bias)
    has_norms = family.qk_norm == "always" or (family.qk_norm == "as said" and config.use_qk_norm)
    writer.switch("use_qk_norm", "--qk-layernorm", has_norms)
    # Experts, further tokens and the embedding.
    _write_experts(writer, config, family)
    further_tokens(writer, config)
    # A file without the key means the default of its class.
    is_tied = family.tied if config.tie_word_embeddings is None else config.tie_word_embeddings
    writer.switch("tie_word_embeddings", "--untie-embeddings-and-output-weights", not is_tied)


def _write_mlp(writer: FlagWriter, config: DecoderConfig, family: Family) -> None:
    if family.experts == "gpt_oss":
        # GPT-OSS clamps its activation and adds one to the linear half.
        writer.add("swiglu_limit", "--quick-geglu", "--glu-linear-offset", "1.0")
        writer.add("swiglu_limit", "--activation-func-clamp-value", config.swiglu_limit)
        writer.add("model_type", "--softmax-type", "learnable")
    elif family.is_gated:
        writer.add("hidden_act", "--swiglu")
    elif family.activation_flag:
        writer.add("hidden_act", family.activation_flag)
    # Megatron gives every linear layer a bias by default.
    writer.switch("model_type", "--disable-bias-linear", not family.biased)


def _write_norms(writer: FlagWriter, config: DecoderConfig, family: Family) -> None:
    if family.normalization != "LayerNorm":
        writer.add("rms_norm_eps", "--normalization", family.normalization)
    writer.switch("model_type", "--apply-layernorm-1p", family.layernorm_1p)
    # The key is noted with the flag only to name its line; each family has one of them.
    key = next((k for k in ("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps")
                if k in family.keys), "rms_norm_eps")  # fmt: skip
    writer.add(key, "--norm-epsilon", repr(config.norm_eps))


def _write_experts(writer: FlagWriter, config: DecoderConfig, family: Family) -> None:
    if family.experts in ("mixtral", "gpt_oss"):
        few_experts(writer, config)
    elif family.experts == "qwen":
        qwen_experts(writer, config)
    elif family.experts == "routed":
        routed_experts(writer, config, config.num_hidden_layers, config.intermediate_size)


def _write_windows(writer: FlagWriter, config: DecoderConfig, family: Family) -> None:
    """Write a window of attention: a token sees itself and `sliding_window` - 1 before it."""
    windowed = _windowed_layers(writer, config, family)
    if not any(windowed):
        return
    # A list of layers may ask for windows whose size no key gives.
    if not config.sliding_window:
        writer.refuse("layer_types", "has sliding_attention, but there is no sliding_window")
    writer.add("sliding_window", "--window-size", f"{config.sliding_window - 1},0")
    # Megatron's flag marks the layers that have a window; without it all have.
    if 0 in windowed:
        key = "layer_types" if config.layer_types else "max_window_layers"
        writer.add(key, "--window-attn-skip-freq", layer_pattern(windowed))


def _windowed_layers(writer: FlagWriter, config: DecoderConfig, family: Family) -> list[int]:
    """Return 1 for each layer with a window, 0 for each other."""
    num_layers = config.num_hidden_layers
    # Qwen's files carry sizes of windows that this switch turns off.
    is_off = "use_sliding_window" in family.keys and not config.use_sliding_window
    if config.layer_types is not None:
        types = config.layer_types
        if len(types) != num_layers:
            writer.refuse(
                "layer_types",
                f"names {len(types)} layers; num_hidden_layers is {num_layers}: name each, or "
                "leave it out",
            )
        for kind in set(types):
            writer.require("layer_types", kind, *_LAYER_TYPES)
        windowed = [_LAYER_TYPES.index(kind) for kind in types]
        if is_off and any(windowed):
            writer.refuse("layer_types", "has sliding_attention, but use_sliding_window is false")
        return windowed
    if is_off or not config.sliding_window or family.windows == "none":
        return [0] * num_layers
    # Even layers have a window, odd ones see everything.
    if family.windows == "alternate":
        return [1 - i % 2 for i in range(num_layers)]
    if family.windows == "all":
        return [1] * num_layers
    # Layers from this one on have a window; by default none has.
    first = num_layers if config.max_window_layers is None else config.max_window_layers
    return [int(i >= first) for i in range(num_layers)]


def _write_layers_without_rotation(
    writer: FlagWriter, config: DecoderConfig, family: Family
) -> None:
    if "no_rope_layers" not in family.keys:
        return
    every, rotated = config.no_rope_layer_interval, config.no_rope_layers
    # `transformers` leaves every so many layers without rotation, counted from 1.
    if rotated is None:
        rotated = [int((i + 1) % every != 0) for i in range(config.num_hidden_layers)]
    if len(rotated) != config.num_hidden_layers or not set(rotated) <= {0, 1}:
        writer.refuse(
            "no_rope_layers",
            f"has to be a list of 0 or 1 for each of {config.num_hidden_layers} layers",
        )
    if 0 in rotated:
        key = "no_rope_layers" if config.no_rope_layers else "no_rope_layer_interval"
        # The file marks layers with rotation, Megatron's flag those without.
        writer.add(key, "--no-rope-freq", layer_pattern([1 - kind for kind in rotated]))
