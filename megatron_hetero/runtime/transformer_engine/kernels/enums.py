"""Enumerations of the compiled part of Transformer Engine, member for member."""

from __future__ import annotations

from enum import IntEnum

DType = IntEnum(
    "DType",
    {
        "kByte": 0,
        "kInt32": 2,
        "kFloat32": 4,
        "kFloat16": 5,
        "kBFloat16": 6,
        "kFloat8E4M3": 7,
        "kFloat8E5M2": 8,
        "kFloat4E2M1": 10,
    },
)


def _numbered(name: str, members: str, first: int = 0) -> type[IntEnum]:
    return IntEnum(name, {member: first + i for i, member in enumerate(members.split())})  # type: ignore[return-value]


FP8FwdTensors = _numbered(
    "FP8FwdTensors",
    "GEMM1_INPUT GEMM1_WEIGHT GEMM1_OUTPUT GEMM2_INPUT GEMM2_WEIGHT GEMM2_OUTPUT "
    "GEMM3_INPUT GEMM3_WEIGHT GEMM3_OUTPUT",
)
FP8BwdTensors = _numbered(
    "FP8BwdTensors",
    "GRAD_OUTPUT1 GRAD_INPUT1 GRAD_OUTPUT2 GRAD_INPUT2 GRAD_OUTPUT3 GRAD_INPUT3",
)
CommOverlapType = _numbered("CommOverlapType", "RS AG")
NVTE_Bias_Type = _numbered(
    "NVTE_Bias_Type", "NVTE_NO_BIAS NVTE_PRE_SCALE_BIAS NVTE_POST_SCALE_BIAS NVTE_ALIBI"
)
NVTE_Mask_Type = _numbered(
    "NVTE_Mask_Type",
    "NVTE_NO_MASK NVTE_PADDING_MASK NVTE_CAUSAL_MASK NVTE_PADDING_CAUSAL_MASK "
    "NVTE_CAUSAL_BOTTOM_RIGHT_MASK NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK",
)
NVTE_Softmax_Type = _numbered(
    "NVTE_Softmax_Type", "NVTE_VANILLA_SOFTMAX NVTE_OFF_BY_ONE_SOFTMAX NVTE_LEARNABLE_SOFTMAX"
)
NVTE_QKV_Format = _numbered(
    "NVTE_QKV_Format",
    "NVTE_QKV_Format_NOT_SET NVTE_SBHD NVTE_BSHD NVTE_THD NVTE_BSHD_2SBHD NVTE_SBHD_2BSHD "
    "NVTE_THD_2BSHD NVTE_THD_2SBHD NVTE_BHSD",
)
NVTE_QKV_Layout = _numbered(
    "NVTE_QKV_Layout",
    "NVTE_QKV_Layout_NOT_SET NVTE_SB3HD NVTE_SBH3D NVTE_SBHD_SB2HD NVTE_SBHD_SBH2D "
    "NVTE_SBHD_SBHD_SBHD NVTE_BS3HD NVTE_BSH3D NVTE_BSHD_BS2HD NVTE_BSHD_BSH2D "
    "NVTE_BSHD_BSHD_BSHD NVTE_T3HD NVTE_TH3D NVTE_THD_T2HD NVTE_THD_TH2D NVTE_THD_THD_THD "
    "NVTE_SBHD_BSHD_BSHD NVTE_BSHD_SBHD_SBHD NVTE_THD_BSHD_BSHD NVTE_THD_SBHD_SBHD "
    "NVTE_Paged_KV_BSHD_BSHD_BSHD NVTE_Paged_KV_BSHD_SBHD_SBHD NVTE_Paged_KV_SBHD_BSHD_BSHD "
    "NVTE_Paged_KV_SBHD_SBHD_SBHD NVTE_Paged_KV_THD_BSHD_BSHD NVTE_Paged_KV_THD_SBHD_SBHD "
    "NVTE_BHSD_BHSD_BHSD",
)
NVTE_Fused_Attn_Backend = IntEnum(
    "NVTE_Fused_Attn_Backend",
    {"NVTE_No_Backend": -1, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
)
NVTEScalingMode = _numbered(
    "NVTEScalingMode",
    "NVTE_DELAYED_TENSOR_SCALING NVTE_MXFP8_1D_SCALING NVTE_BLOCK_SCALING_1D "
    "NVTE_BLOCK_SCALING_2D NVTE_NVFP4_1D_SCALING",
)
NVTERoutingMapFormat = _numbered("NVTERoutingMapFormat", "BYTEMAP BITMAP_U8")
NVTEQBHistogramMode = _numbered("NVTEQBHistogramMode", "TWO_KERNEL FUSED_ATOMIC")
