"""Which attention Transformer Engine computes on this GPU: fused kernels, or stored scores.

Prices and memory of a plan are those of a fused kernel.  Where neither flash-attn is installed nor
cuDNN has a kernel for the shape, Transformer Engine stores the scores without a word.
"""

from __future__ import annotations

import importlib
from typing import Literal

import torch

from megatron_hetero.model.spec import ModelSpec

AttentionKernel = Literal["flash", "fused", "unfused"]
_UTILS = "transformer_engine.pytorch.attention.dot_product_attention.utils"


def attention_kernel(model: ModelSpec) -> AttentionKernel | None:
    """Ask Transformer Engine for the kernel of a model's causal attention in bf16.

    The process creates its CUDA context.  Source: `get_attention_backend` of Transformer Engine
    2.20, which each attention layer calls before its first forward pass.

    Returns:
        None where there is no Transformer Engine, or one that answers in another form.
    """
    queries, values = model.head_sizes
    # Latent attention gives each head keys of its own.
    groups = model.num_attention_heads if model.kv_lora_rank else model.num_query_groups
    try:
        utils = importlib.import_module(_UTILS)
        asked = utils.AttentionParams(
            qkv_dtype=torch.bfloat16,
            # Megatron's layout: sequence, batch, heads, channels.
            qkv_layout="sbhd_sbhd_sbhd",
            num_heads=model.num_attention_heads,
            num_gqa_groups=groups,
            max_seqlen_q=model.seq_length,
            max_seqlen_kv=model.seq_length,
            head_dim_qk=queries,
            head_dim_v=values,
            attn_mask_type="causal",
            # No limit to the left, nothing to the right: causal attention over all tokens.
            window_size=(-1, 0),
        )
        flash, _, fused, _, unfused, _ = utils.get_attention_backend(asked)
    except (ImportError, AttributeError, TypeError, ValueError):
        return None
    if flash:
        return "flash"
    if fused:
        return "fused"
    return "unfused" if unfused else None
