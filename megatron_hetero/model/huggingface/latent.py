"""`config.json` of DeepSeek-V2, -V3, Kimi K2 and their like: latent attention over many experts.

The keys are those of the families' own configurations; Megatron's flags for them are the ones that
its DeepSeek recipes give.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hetero.model.huggingface.config import LatentConfig
from megatron_hetero.model.huggingface.experts import further_tokens, routed_experts
from megatron_hetero.model.huggingface.positions import read_rotary, write_latent_rotary
from megatron_hetero.model.huggingface.writer import FlagWriter, dropouts, shape_of

_V3: Mapping[str, Any] = {
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
}

LATENT_FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {
        "q_lora_rank": 1536,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
    },
    "deepseek_v3": _V3,
    # Kimi K2 is read by DeepSeek-V3's class.
    "kimi_k2": _V3,
    "glm4_moe_lite": {
        **_V3,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    },
}
"""Values of keys that a file leaves out, by family: the defaults of its class."""


def write_latent(writer: FlagWriter, config: LatentConfig) -> None:
    """Write the flags.

    Raises:
        UnsupportedError: Megatron has no flag for a value.
    """
    # Forms for which Megatron's latent attention has no flag.
    writer.require("hidden_act", config.hidden_act, "silu")
    writer.require("attention_bias", config.attention_bias, False)
    writer.require("rope_interleave", config.rope_interleave, True)
    shape_of(writer, config)
    if config.hidden_size % config.num_attention_heads:
        # Latent attention has widths of its own, and yet Megatron wants this one to come out even.
        writer.add("v_head_dim", "--kv-channels", config.v_head_dim)
    # The families have norms over their latents, which Megatron calls norms of queries and keys.
    writer.add("kv_lora_rank", "--multi-latent-attention", "--qk-layernorm")
    writer.add("hidden_act", "--swiglu", "--disable-bias-linear")
    # Without the key, queries come from the hidden state directly.
    if config.q_lora_rank:
        writer.add("q_lora_rank", "--q-lora-rank", config.q_lora_rank)
    writer.sizes(
        {
            "kv_lora_rank": ("--kv-lora-rank", config.kv_lora_rank),
            "qk_nope_head_dim": ("--qk-head-dim", config.qk_nope_head_dim),
            "qk_rope_head_dim": ("--qk-pos-emb-head-dim", config.qk_rope_head_dim),
            "v_head_dim": ("--v-head-dim", config.v_head_dim),
        }
    )
    writer.add("rms_norm_eps", "--normalization", "RMSNorm")
    writer.add("rms_norm_eps", "--norm-epsilon", repr(config.rms_norm_eps))
    # Files name no dropout behind layers, as these families have none.
    dropouts(writer, ("attention_dropout", config.attention_dropout), ("attention_dropout", 0.0))
    write_latent_rotary(writer, read_rotary(writer, config))
    routed_experts(writer, config, config.num_hidden_layers, config.intermediate_size)
    further_tokens(writer, config)
    writer.switch(
        "tie_word_embeddings",
        "--untie-embeddings-and-output-weights",
        not config.tie_word_embeddings,
    )
