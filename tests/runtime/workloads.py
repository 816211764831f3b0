"""Small workloads for tests of the runtime; `verify` shrinks them further."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan

_TRAINING = {field.name for field in fields(TrainingSpec)}


def workload(**changes: Any) -> Workload:
    """A GPT with 24 heads, which every width from 1 to 4 divides; `changes` by field name."""
    model: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 96,
        "ffn_hidden_size": 384,
        "num_attention_heads": 24,
        "num_query_groups": 24,
        "kv_channels": 4,
        "vocab_size": 1000,
        "seq_length": 48,
        "max_position_embeddings": 48,
    }
    training: dict[str, Any] = {"global_batch_size": 6, "micro_batch_size": 1}
    for name, value in changes.items():
        (training if name in _TRAINING else model)[name] = value
    return Workload(ModelSpec(**model), TrainingSpec(**training), (), "a test")


def plan(layout: str) -> Plan:
    return plan_from_layout(parse_layout(layout))


LLAMA_LIKE: dict[str, Any] = {
    "gated_mlp": True,
    "num_query_groups": 12,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding": "rope",
    "tied_embeddings": False,
}
"""Gated MLP, grouped queries, rotary positions, RMS norms, no biases, untied embeddings."""

MIXTRAL_LIKE: dict[str, Any] = {
    **LLAMA_LIKE,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 192,
    "sequence_parallel": True,
}
"""Experts in place of the MLP; Megatron trains them on a group only with sequence parallelism."""

LATENT: dict[str, Any] = {
    "gated_mlp": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding": "rope",
    "tied_embeddings": False,
    "qk_layernorm": True,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "divides_latents": True,
}
"""Multi-latent attention with norms of the latents, in a model that is Llama-like otherwise."""

DEEPSEEK_LIKE: dict[str, Any] = {
    **LATENT,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 96,
    "moe_shared_expert_intermediate_size": 96,
    "moe_layer_freq": (0, 1, 1, 1),
    "sequence_parallel": True,
}
"""Latent attention, a dense layer below layers with experts, and a shared expert in each."""
