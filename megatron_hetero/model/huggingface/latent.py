"""`config.json` of DeepSeek-V2, -V3, Kimi K2 and their like: latent attention over many experts.

The keys are those of the families' own configurations; Megatron's flags for them are the ones that
its DeepSeek recipes give.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field

from megatron_hetero.files import Document
from megatron_hetero.model.huggingface.config import HuggingFaceConfig
from megatron_hetero.model.huggingface.words import (
    dropout_flags,
    layer_flags,
    require,
    rms_norm_flags,
    rotary_flags,
    shape_flags,
)

LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")


class LatentConfig(HuggingFaceConfig):
    """Keys of models with multi-latent attention and, but for the first layers, experts."""

    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    q_lora_rank: int | None = Field(None, ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=1)
    v_head_dim: int = Field(ge=1)
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(1e-6, gt=0)
    rope_theta: float = Field(10000.0, gt=0)
    rope_scaling: dict[str, Any] | None = None
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    attention_bias: bool = False
    n_routed_experts: int | None = Field(None, ge=1)
    n_shared_experts: int | None = Field(None, ge=1)
    num_experts_per_tok: int | None = Field(None, ge=1)
    moe_intermediate_size: int | None = Field(None, ge=1)
    moe_layer_freq: int = Field(1, ge=1)
    first_k_dense_replace: int = Field(0, ge=0)
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: int | None = Field(None, ge=1)
    topk_group: int | None = Field(None, ge=1)
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    num_nextn_predict_layers: int | None = Field(None, ge=0)


def latent_flags(document: Document, config: LatentConfig, differences: list[str]) -> list[str]:
    """Translate the keys to Megatron flags.

    Args:
        document: the file, for messages.
        config: its keys.
        differences: what Megatron's model will not have is added here, in words.
    Raises:
        UnsupportedError: Megatron has no flag for a value.
    """
    require(document, "hidden_act", config.hidden_act, "silu")
    require(document, "attention_bias", config.attention_bias, False)
    sizes = {
        **({"--q-lora-rank": config.q_lora_rank} if config.q_lora_rank else {}),
        "--kv-lora-rank": config.kv_lora_rank,
        "--qk-head-dim": config.qk_nope_head_dim,
        "--qk-pos-emb-head-dim": config.qk_rope_head_dim,
        "--v-head-dim": config.v_head_dim,
    }
    flags = shape_flags(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.max_position_embeddings,
    )
    flags += ["--multi-latent-attention", "--qk-layernorm", "--swiglu", "--disable-bias-linear"]
    flags += [word for flag, size in sizes.items() for word in (flag, str(size))]
    flags += rms_norm_flags(config.rms_norm_eps)
    flags += dropout_flags(config.attention_dropout, 0.0)
    flags += _positions(document, config)
    if config.n_routed_experts is not None:
        flags += _experts(document, config, config.n_routed_experts)
    if not config.tie_word_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    if config.num_nextn_predict_layers:
        differences.append(
            f"{config.num_nextn_predict_layers} layers that predict further tokens are left out"
        )
    return flags


def _positions(document: Document, config: LatentConfig) -> list[str]:
    flags = rotary_flags(document, config.rope_theta)
    scaling = config.rope_scaling or {}
    kind = scaling.get("type", scaling.get("rope_type", "default"))
    if kind == "default":
        return [*flags, "--rope-type", "rope"]
    require(document, "rope_scaling", kind, "yarn")
    flags += ["--rope-type", "yarn"]
    for key, flag in (
        ("factor", "--rotary-scaling-factor"),
        ("mscale", "--mscale"),
        ("mscale_all_dim", "--mscale-all-dim"),
    ):
        if key in scaling:
            flags += [flag, str(scaling[key])]
    return flags


def _experts(document: Document, config: LatentConfig, num_experts: int) -> list[str]:
    columns = config.moe_intermediate_size or config.intermediate_size
    flags = ["--num-experts", str(num_experts), "--moe-ffn-hidden-size", str(columns)]
    flags += ["--moe-router-topk", str(config.num_experts_per_tok or 1)]
    num_layers, first = config.num_hidden_layers, config.first_k_dense_replace
    pattern = [
        int(layer >= first and layer % config.moe_layer_freq == 0) for layer in range(num_layers)
    ]
    flags += layer_flags(pattern)
    if config.n_shared_experts:
        flags += ["--moe-shared-expert-intermediate-size", str(config.n_shared_experts * columns)]
    require(document, "scoring_func", config.scoring_func, "softmax", "sigmoid")
    flags += ["--moe-router-score-function", config.scoring_func]
    if config.scoring_func == "softmax" and not config.norm_topk_prob:
        flags.append("--moe-router-pre-softmax")
    if config.n_group and config.topk_group and config.topk_method != "greedy":
        flags += ["--moe-router-num-groups", str(config.n_group)]
        flags += ["--moe-router-group-topk", str(config.topk_group)]
    if config.topk_method == "noaux_tc":
        flags.append("--moe-router-enable-expert-bias")
    if config.routed_scaling_factor != 1.0:
        flags += ["--moe-router-topk-scaling-factor", str(config.routed_scaling_factor)]
    return flags
