"""GPT-NeoX, OPT, GPT-2 and GPT-BigCode: biases everywhere, no gates."""

from __future__ import annotations

from megatron_hetero.model.huggingface.config import Gpt2Config, NeoxConfig, OptConfig
from megatron_hetero.model.huggingface.positions import read_rotary, write_rotary
from megatron_hetero.model.huggingface.writer import FlagWriter, dropouts, shape_of


def write_neox(writer: FlagWriter, config: NeoxConfig) -> None:
    """Write the flags of GPT-NeoX."""
    # Megatron has no parallel residual; shapes and costs are the same.
    if config.use_parallel_residual:
        writer.differ("attention and MLP run one after the other, not in parallel")
    writer.require("attention_bias", config.attention_bias, True)
    _note_activation(writer, config.hidden_act)
    shape_of(writer, config)
    # NeoX rotates a quarter of each head's channels, unless the file says otherwise.
    write_rotary(writer, read_rotary(writer, config, share=0.25), always_share=True)
    writer.add("layer_norm_eps", "--norm-epsilon", repr(config.layer_norm_eps))
    dropouts(
        writer,
        ("attention_dropout", config.attention_dropout),
        ("hidden_dropout", config.hidden_dropout),
    )
    _untie(writer, bool(config.tie_word_embeddings))


def write_opt(writer: FlagWriter, config: OptConfig) -> None:
    """Write the flags of OPT.

    Raises:
        UnsupportedError: a form that Megatron has no flag for.
    """
    # OPT-350m projects its embedding, and Megatron has no such part.
    projection = config.word_embed_proj_dim or config.hidden_size
    writer.require("word_embed_proj_dim", projection, config.hidden_size)
    writer.require("do_layer_norm_before", config.do_layer_norm_before, True)
    writer.require("enable_bias", config.enable_bias, True)
    writer.require("activation_dropout", config.activation_dropout, 0.0)
    _note_activation(writer, config.activation_function)
    writer.sizes(
        {
            "num_hidden_layers": ("--num-layers", config.num_hidden_layers),
            "hidden_size": ("--hidden-size", config.hidden_size),
            "ffn_dim": ("--ffn-hidden-size", config.ffn_dim),
            "num_attention_heads": ("--num-attention-heads", config.num_attention_heads),
            "max_position_embeddings": (
                "--max-position-embeddings",
                config.max_position_embeddings,
            ),
        }
    )
    dropouts(writer, ("attention_dropout", config.attention_dropout), ("dropout", config.dropout))
    if config.init_std != 0.02:
        writer.add("init_std", "--init-method-std", repr(config.init_std))
    # OPT and GPT-2 tie the embedding unless the file says not to.
    _untie(writer, config.tie_word_embeddings is not False)


def write_gpt2(writer: FlagWriter, config: Gpt2Config) -> None:
    """Write the flags of GPT-2 or GPT-BigCode."""
    _note_activation(writer, config.activation_function)
    writer.sizes(
        {
            "n_layer": ("--num-layers", config.n_layer),
            "n_embd": ("--hidden-size", config.n_embd),
            "n_inner": ("--ffn-hidden-size", config.n_inner or 4 * config.n_embd),
            "n_head": ("--num-attention-heads", config.n_head),
            "n_positions": ("--max-position-embeddings", config.n_positions),
        }
    )
    # BigCode's heads share one key and value, which is one query group.
    if config.model_type == "gpt_bigcode" and config.multi_query:
        writer.require("num_key_value_heads", config.num_key_value_heads, 1, None)
        writer.add("multi_query", "--group-query-attention", "--num-query-groups", 1)
    # Megatron has one dropout for both places.
    if config.embd_pdrop != config.resid_pdrop:
        writer.differ(
            f"dropout after the embedding is resid_pdrop {config.resid_pdrop}, not embd_pdrop "
            f"{config.embd_pdrop}"
        )
    writer.add("layer_norm_epsilon", "--norm-epsilon", repr(config.layer_norm_epsilon))
    dropouts(writer, ("attn_pdrop", config.attn_pdrop), ("resid_pdrop", config.resid_pdrop))
    _untie(writer, config.tie_word_embeddings is not False)


def _untie(writer: FlagWriter, is_tied: bool) -> None:
    writer.switch("tie_word_embeddings", "--untie-embeddings-and-output-weights", not is_tied)


def _note_activation(writer: FlagWriter, activation: str) -> None:
    """Note an activation other than gelu, Megatron's without a flag; shape and cost are the
    same."""
    if not activation.startswith("gelu"):
        writer.differ(f"the activation is gelu, not {activation}")
