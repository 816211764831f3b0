"""Refusal of a checkpoint of another model than the one that a `config.json` describes.

Megatron compares nothing of this with `--finetune`. It loads fewer layers than there are, fills
rows of the vocabulary that are missing with numbers of its own, and gives equally large matrices of
other heads; all would be written as weights of the model of `config.json`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from megatron_hetero.errors import CheckpointError

# fmt: off
_NAMES = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups",
    "kv_channels", "normalization", "layernorm_epsilon", "layernorm_zero_centered_gamma",
    "swiglu", "squared_relu", "quick_geglu", "glu_linear_offset", "add_bias_linear",
    "add_qkv_bias", "qk_layernorm", "qk_l2_norm", "softmax_type", "attention_output_gate",
    "window_size", "multi_latent_attention", "position_embedding_type", "rotary_base",
    "rotary_percent", "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor",
    "no_rope_freq", "untie_embeddings_and_output_weights", "num_experts", "moe_ffn_hidden_size",
    "moe_router_topk", "moe_router_pre_softmax", "moe_router_score_function",
    "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
    "moe_shared_expert_intermediate_size", "mtp_num_layers",
)
# fmt: on
"""Megatron's arguments that say what the weights of a GPT mean, or which weights there are."""


def check_same_model(args: Any) -> None:
    """Compare the arguments in the checkpoint of `args.load` with those of `config.json`, `args`.

    Raises:
        CheckpointError: the checkpoint is of another model; names all differences.
    """
    from megatron.training.checkpointing import load_args_from_checkpoint

    # It sets what it finds in the arguments that it is given, and returns the checkpoint's own.
    found = load_args_from_checkpoint(copy.copy(args))
    if not isinstance(found, tuple):
        return  # the checkpoint has no arguments
    differences = differences_of(vars(found[1]), vars(args))
    if differences:
        raise CheckpointError(
            f"{args.load} is a checkpoint of another model than config.json describes: "
            f"{'; '.join(differences)}. Give the config.json of the model that was trained"
        )


def differences_of(trained: Mapping[str, Any], described: Mapping[str, Any]) -> list[str]:
    """Return in words how the arguments of a checkpoint and of a `config.json` differ."""
    found = [
        f"{name} is {theirs} in the checkpoint, {ours} by config.json"
        for name in _NAMES
        # Older checkpoints lack some.
        if name in trained and name in described
        if (theirs := _value(trained, name)) != (ours := _value(described, name))
    ]
    # Only a learned table of positions has a length.
    if described.get("position_embedding_type") == "learned_absolute":
        lengths = [given.get("max_position_embeddings") for given in (trained, described)]
        if lengths[0] not in (None, lengths[1]):
            found.append(
                f"max_position_embeddings is {lengths[0]} in the checkpoint, {lengths[1]} by "
                "config.json"
            )
    return [*found, *_vocabulary(trained, described)]


def _value(given: Mapping[str, Any], name: str) -> Any:
    """Return the value that counts: without groups each query head has its own keys."""
    if name == "num_query_groups" and not given.get("group_query_attention"):
        return given["num_attention_heads"]
    # Not in use: whatever it is.
    if name == "rope_scaling_factor" and not given.get("use_rope_scaling"):
        return None
    if name.startswith("rotary_") and given.get("position_embedding_type") != "rope":
        return None
    if name.startswith("moe_") and not given.get("num_experts"):
        return None
    value = given[name]
    return tuple(value) if isinstance(value, list) else value


def _vocabulary(trained: Mapping[str, Any], described: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with the size of the vocabulary: rows may be cut if they are padding."""
    rows, wanted = trained.get("padded_vocab_size"), described["padded_vocab_size"]
    if rows is None:
        return []
    if wanted > rows:
        return [f"the checkpoint has {rows} rows of a vocabulary, config.json wants {wanted}"]
    # A tokenizer's size is in no argument; then rows are padding up to one multiple, which all
    # widths of a plan divide. The widths are rank 0's alone, the number of ranks bounds them.
    num_ranks = trained.get("world_size") or 1
    multiple = (trained.get("make_vocab_size_divisible_by") or 1) * num_ranks**2
    tokens = trained.get("vocab_size") or rows - multiple + 1
    if wanted < tokens:
        return [f"the checkpoint's vocabulary has at least {tokens} tokens, config.json's {wanted}"]
    return []
