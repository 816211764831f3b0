"""Megatron's flags of the small model's architecture."""

from __future__ import annotations

from megatron_hetero.model.flag_table import flag_table, last_of_each
from megatron_hetero.model.spec import ModelSpec, Workload

BALANCING = "--moe-router-load-balancing-type"


def architecture_flags(small: ModelSpec, workload: Workload) -> list[str]:
    """Return the flags of groups, experts, latents and further tokens.

    Args:
        small: the small model.
        workload: the job that it stands for.
    """
    flags = []
    if small.num_query_groups != small.num_attention_heads:
        flags += ["--group-query-attention", f"--num-query-groups={small.num_query_groups}"]
    flags += _switches(small, workload.megatron_args)
    flags += _experts(small, balances_by_choice(workload))
    flags += _latent_attention(small)
    if small.mtp_num_layers:
        flags.append(f"--mtp-num-layers={small.mtp_num_layers}")
    return flags


def balances_by_choice(workload: Workload) -> bool:
    """Tell if the job's routers balance experts by sinkhorn, which takes no balancing loss."""
    given = last_of_each(flag_table().split(workload.megatron_args))
    return any(o.name == BALANCING and "sinkhorn" in o.values for o in given)


def _switches(model: ModelSpec, job: tuple[str, ...]) -> list[str]:
    switches = {
        "--swiglu": model.gated_mlp and "--quick-geglu" not in job,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
        "--disable-bias-linear": not model.add_bias_linear,
        "--add-qkv-bias": model.add_qkv_bias,
        "--qk-layernorm": model.qk_layernorm,
        "--attention-output-gate": model.attention_output_gate,
    }
    return [flag for flag, on in switches.items() if on]


def _experts(small: ModelSpec, by_choice: bool) -> list[str]:
    """Return the flags of experts, with a balancing loss unless they are balanced `by_choice`."""
    if not small.num_experts:
        return []
    more = []
    if 0 in small.moe_layer_freq:
        more.append(f"--moe-layer-freq={list(small.moe_layer_freq)}".replace(" ", ""))
    shared = small.moe_shared_expert_intermediate_size
    if shared:
        more.append(f"--moe-shared-expert-intermediate-size={shared}")
    if small.moe_shared_expert_gate:
        more.append("--moe-shared-expert-gate")
    return [
        *more,
        f"--num-experts={small.num_experts}",
        f"--moe-router-topk={small.moe_router_topk}",
        f"--moe-ffn-hidden-size={small.moe_ffn_hidden_size}",
        *(() if by_choice else ("--moe-aux-loss-coeff=0.01",)),
        "--moe-z-loss-coeff=0.001",
    ]


def _latent_attention(small: ModelSpec) -> list[str]:
    if not small.kv_lora_rank:
        return []
    sizes = {
        "--q-lora-rank": small.q_lora_rank,
        "--kv-lora-rank": small.kv_lora_rank,
        "--qk-head-dim": small.qk_head_dim,
        "--qk-pos-emb-head-dim": small.qk_pos_emb_head_dim,
        "--v-head-dim": small.v_head_dim,
    }
    return ["--multi-latent-attention", *(f"{flag}={size}" for flag, size in sizes.items() if size)]
