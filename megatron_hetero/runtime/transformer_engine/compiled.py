"""The module that stands for the compiled `transformer_engine_torch`: our kernels by their names.

A function of the compiled part that has no counterpart is there by name, and refuses when it is
called. Names that the compiled part does not have either are not there.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.runtime.transformer_engine.kernels import (
    activations,
    attention,
    enums,
    float8,
    machine,
    norms,
    optimizers,
    products,
    softmax,
)

_ROOMS = (attention, enums, float8, machine, norms, optimizers, products, softmax)

MISSING: Mapping[str, str] = {
    "fp8 and fp4 with scales of blocks (--fp8-recipe blockwise, mxfp8; --fp4-format)": """
        bgrad_group_quantize compute_amax dbias_dgelu
        dbias_dqgelu dbias_drelu dbias_dsilu dbias_dsrelu
        fp8_block_scaling_compute_partial_amax fp8_block_scaling_partial_cast
        fused_amax_and_scale_update_after_reduction fused_multi_row_padding
        fused_multi_row_unpadding group_quantize group_requantize_inplace
        grouped_swizzle_for_gemm multi_tensor_adam_fp8 multi_tensor_compute_scale_and_scale_inv
        multi_tensor_compute_scale_inv_e8m0 mxfp8_scaling_compute_partial_amax
        mxfp8_scaling_partial_cast nvfp4_2d_scale_transpose nvfp4_compute_global_scale
        nvfp4_data_transpose nvfp4_group_quantize_with_amax nvfp4_quantize_with_amax
        split_quantize swizzle_scales_for_gemm_ nvfp4_2d_multi_tensor_transpose
        nvfp4_multi_tensor_2d_partial_cast nvfp4_multi_tensor_compute_partial_amax
        nvfp4_multi_tensor_fused_scale multi_tensor_swizzle_scales_for_gemm_unchecked_
        """,
    "activations that clamp or scale (--use-te-activation-func)": """
        clamped_dswiglu clamped_swiglu dsituglu scaled_clamped_dswiglu scaled_clamped_swiglu
        scaled_dsituglu scaled_dsrelu scaled_dswiglu scaled_situglu scaled_srelu scaled_swiglu
        situglu
        """,
    "packed sequences under context parallelism": """
        convert_bshd_to_thd convert_thd_to_bshd thd_copy_valid_tokens_from_per_split_to_rank_local
        thd_cp_rank_order_to_sequence_order thd_get_partitioned_indices thd_grad_correction
        thd_out_correction thd_read_half_tensor thd_read_second_half_lse
        thd_second_half_lse_correction thd_sequence_order_to_cp_rank_order
        """,
    "fused rotation of positions (leave --no-rope-fusion in)": """
        fused_qkv_rope_backward fused_qkv_rope_forward fused_rope_backward fused_rope_forward
        """,
    "fused routing of experts (--moe-router-fusion, --moe-permute-fusion)": """
        fused_moe_aux_loss_bwd fused_moe_aux_loss_fwd fused_moe_aux_loss_fwd_graph_safe
        fused_score_for_moe_aux_loss_bwd fused_score_for_moe_aux_loss_fwd
        fused_topk_with_score_function_bwd fused_topk_with_score_function_fwd
        fused_topk_with_score_function_qb_fwd moe_permute_bwd moe_permute_fwd moe_unpermute_bwd
        moe_unpermute_fwd ep_combine ep_combine_bwd ep_dispatch ep_dispatch_bwd ep_finalize
        ep_get_zero_copy ep_handle_mem_size ep_initialize ep_prepare ep_prepare_and_dispatch
        """,
    "exchanges under products (--tp-comm-overlap)": """
        CommOverlap CommOverlapBase CommOverlapHelper CommOverlapP2P
        bulk_overlap_ag_with_external_gemm
        """,
    "optimizers within CUDA graphs, Muon on cuSOLVER": """
        cusolvermp_ctx_create cusolvermp_ctx_destroy multi_tensor_adam_capturable
        multi_tensor_adam_capturable_master newton_schulz
        """,
    "--use-transformer-engine-op-fuser and other layers": """
        copy_data_ptrs_to_device copy_to_kv_cache dropout_bwd dropout_fwd fa_prepare_bwd
        fa_prepare_fwd get_grouped_gemm_setup_workspace_size grouped_mlp_experimental
        multi_tensor_transpose_to_bhsd splits_to_offsets splits_to_offsets_multi
        te_general_grouped_gemm_for_discrete_in te_general_grouped_gemm_for_discrete_out
        te_general_grouped_gemm_for_grouped_tensor
        """,
}
"""Purpose -> functions of the compiled part without a counterpart."""


def compiled_module(name: str) -> types.ModuleType:
    """Return a module of our kernels under the name of the compiled one."""
    module = types.ModuleType(name, __doc__)
    for purpose, names in MISSING.items():
        for missing in names.split():
            setattr(module, missing, _missing(missing, purpose))
    # A room's own functions and enumerations; what it imports stays out.
    for room in _ROOMS:
        vars(module).update(
            (key, value)
            for key, value in vars(room).items()
            if getattr(value, "__module__", None) in (room.__name__, "enum")
            and not key.startswith("_")
        )
    vars(module).update(activations.functions())
    module.FP8TensorMeta = _named_class("FP8TensorMeta")
    return module


def apex_module(name: str) -> types.ModuleType:
    """Return a module with Apex's functions of `--gradient-accumulation-fusion`."""
    module = types.ModuleType(name, apex_module.__doc__)
    # One function adds in the type of the gradient; Apex has a function for each type.
    module.wgrad_gemm_accum_fp32 = products.wgrad_gemm_accum_fp32
    module.wgrad_gemm_accum_fp16 = products.wgrad_gemm_accum_fp16
    return module


_OF_ONNX = """
    onnx_attention_mask_func onnx_dequantize_fp8_op onnx_dequantize_mxfp8_op onnx_gemm
    onnx_layernorm onnx_quantize_fp8_op onnx_quantize_mxfp8_op te_translation_table
    torch_onnx_gemm_inf_op
"""


def onnx_module(name: str) -> types.ModuleType:
    """Return a module in the place of `onnx_extensions`, whose functions refuse.

    Nothing that trains exports a model, and the real one needs `onnx` and `onnxscript`.
    """
    module = types.ModuleType(name, onnx_module.__doc__)
    for function in _OF_ONNX.split():
        setattr(module, function, _missing(function, "an export to ONNX"))
    return module


def _missing(name: str, purpose: str) -> Callable[..., Any]:
    """Return a refusing stand-in for a function, or a class, without a counterpart."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"Transformer Engine's {name} has no counterpart on a CPU. It belongs to: {purpose}. "
            "Leave that out, or use --transformer-impl local."
        )

    # A class has to be a type, for annotations and `isinstance`.
    if name[0].isupper():
        return type(name, (), {"__init__": refuse})
    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def _named_class(name: str) -> type:
    return type(name, (), {})
