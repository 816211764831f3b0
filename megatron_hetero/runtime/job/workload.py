"""The workload that Megatron's parsed arguments describe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.model.training import TrainingSpec


def workload_of(args: Any, megatron: Sequence[str], micro_batch_size: int) -> Workload:
    """Build the workload that Megatron's parsed arguments describe, for the plan's own validation.

    Args:
        args: Megatron's parsed arguments.
        megatron: Megatron's flags on the command line.
        micro_batch_size: the job's; a replica's own size stands in the plan.
    """
    model = ModelSpec(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=(
            args.num_query_groups if args.group_query_attention else args.num_attention_heads
        ),
        kv_channels=args.kv_channels,
        vocab_size=args.padded_vocab_size,
        seq_length=args.seq_length,
        max_position_embeddings=args.max_position_embeddings,
        gated_mlp=bool(args.swiglu),
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        num_experts=args.num_experts or 0,
        moe_router_topk=args.moe_router_topk if args.num_experts else 0,
        moe_ffn_hidden_size=args.moe_ffn_hidden_size if args.num_experts else 0,
        normalization=args.normalization,
        # The size of the vocabulary has its padding already.
        make_vocab_size_divisible_by=1,
        learns_softmax_offset=args.softmax_type == "learnable",
        attention_output_gate=args.attention_output_gate,
        mtp_num_layers=args.mtp_num_layers or 0,
        **_kinds_of_layers(args),
    )
    training = TrainingSpec(
        global_batch_size=args.global_batch_size,
        micro_batch_size=micro_batch_size,
        precision="bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        # Megatron's parser takes the flag away from ranks of width 1: the job's own words count.
        sequence_parallel="--sequence-parallel" in megatron,
        per_token_loss=args.calculate_per_token_loss,
        flash_attention=args.transformer_impl != "local",
    )
    return Workload(model, training, tuple(megatron), "the command line")


def _kinds_of_layers(args: Any) -> dict[str, Any]:
    """Return the fields of `ModelSpec` of experts beside the plain ones, and of latent
    attention."""
    found: dict[str, Any] = {}
    if args.num_experts:
        frequency = args.moe_layer_freq
        # Megatron's short form n: layers 0, n, 2n and so on have experts.
        if isinstance(frequency, int):
            frequency = [int(i % frequency == 0) for i in range(args.num_layers)]
        found["moe_layer_freq"] = tuple(frequency) if 0 in frequency else ()
    if args.num_experts and args.moe_shared_expert_intermediate_size:
        found["moe_shared_expert_intermediate_size"] = args.moe_shared_expert_intermediate_size
        found["moe_shared_expert_gate"] = args.moe_shared_expert_gate
    if args.multi_latent_attention:
        sizes = ("kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        found |= {name: getattr(args, name) for name in sizes}
        found["q_lora_rank"] = args.q_lora_rank or 0
        found["divides_latents"] = args.transformer_impl == "local"
    return found
