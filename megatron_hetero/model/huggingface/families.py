"""Families of decoders that are built like Llama, with the differences of each family.

Sources: the classes of `transformers` (`models/*/configuration_*.py`, `modeling_*.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

_COMMON = (
    "model_type vocab_size torch_dtype dtype tie_word_embeddings quantization_config "
    "initializer_range num_hidden_layers hidden_size intermediate_size num_attention_heads "
    "num_key_value_heads head_dim max_position_embeddings hidden_act attention_dropout "
    "rope_theta rope_scaling rope_parameters "
)
_WINDOWS = "use_sliding_window sliding_window max_window_layers layer_types "
_ROUTED = (
    "n_routed_experts num_local_experts n_shared_experts num_experts_per_tok moe_intermediate_size "
    "first_k_dense_replace mlp_layer_types scoring_func topk_method n_group topk_group "
    "norm_topk_prob routed_scaling_factor num_nextn_predict_layers "
)
_QWEN_EXPERTS = (
    "num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob "
    "decoder_sparse_step mlp_only_layers shared_expert_intermediate_size "
)
# Activations without a gate -> Megatron's flag; its default is gelu.
_NOT_GATED = {"relu2": "--squared-relu", "gelu": "", "gelu_pytorch_tanh": ""}


@dataclass(frozen=True)
class Family:
    """Properties of a family.

    Attributes:
        more: its keys beside the common ones, divided by spaces.
        defaults: its class's, of keys that a file leaves out, where `DecoderConfig` has others.
        activations: values of `hidden_act` that Megatron has for it.
        qkv_bias: queries, keys and values have biases: never, always, or as the file says.
        qk_norm: likewise the norms of queries and keys, over the channels of a head.
        windows: which layers a window of attention holds for, where no list of layers says it.
        experts: the form of the keys of its experts.
        fixed: values that the other properties rest on.
    """

    more: str = "rms_norm_eps "
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: tuple[str, ...] = ("silu",)
    normalization: Literal["RMSNorm", "LayerNorm"] = "RMSNorm"
    layernorm_1p: bool = False
    tied: bool = False
    biased: bool = False
    qkv_bias: Literal["never", "always", "as said"] = "never"
    qk_norm: Literal["never", "always", "as said"] = "never"
    windows: Literal["all", "behind", "alternate", "none"] = "none"
    experts: Literal["", "mixtral", "qwen", "routed", "gpt_oss"] = ""
    interleaved: bool = False
    rotary_share: float = 1.0
    fixed: Mapping[str, tuple[object, ...]] = field(default_factory=dict)

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys that the family reads."""
        return frozenset((_COMMON + self.more).split()) | set(self.fixed)

    @property
    def is_gated(self) -> bool:
        """Return whether the MLP has a gate."""
        return self.activations[0] not in _NOT_GATED

    @property
    def activation_flag(self) -> str:
        """Return the flag of its activation without a gate; empty for Megatron's gelu."""
        return _NOT_GATED[self.activations[0]]


# Biases that the class allows, and for which no flags are written here.
_NO_BIAS: Mapping[str, tuple[object, ...]] = {"attention_bias": (False,), "mlp_bias": (False,)}
_LLAMA = "rms_norm_eps attention_bias mlp_bias "
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
_GPT_OSS_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "llama": Family(more=_LLAMA, fixed=_NO_BIAS),
    "mistral": Family(
        more="rms_norm_eps sliding_window layer_types",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windows="all",
    ),
    "mixtral": Family(
        more="rms_norm_eps sliding_window num_local_experts num_experts_per_tok",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        windows="all",
        experts="mixtral",
    ),
    "qwen2": Family(
        more="rms_norm_eps " + _WINDOWS,
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        qkv_bias="always",
        windows="behind",
    ),
    "qwen2_moe": Family(
        more="rms_norm_eps qkv_bias " + _WINDOWS + _QWEN_EXPERTS,
        defaults={
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
        },
        qkv_bias="as said",
        experts="qwen",
        fixed={"use_sliding_window": (False,)},
    ),
    "qwen3": Family(
        more="rms_norm_eps attention_bias " + _WINDOWS,
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        qk_norm="always",
        windows="behind",
        fixed={"attention_bias": (False,)},
    ),
    "qwen3_moe": Family(
        more="rms_norm_eps attention_bias num_local_experts " + _WINDOWS + _QWEN_EXPERTS,
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        qk_norm="always",
        windows="all",
        experts="qwen",
        fixed={
            "attention_bias": (False,),
            "qkv_bias": (False,),
            "shared_expert_intermediate_size": (0, None),
            "use_qk_norm": (True,),
        },
    ),
    "glm4_moe": Family(
        more="rms_norm_eps attention_bias use_qk_norm partial_rotary_factor " + _ROUTED,
        defaults=_SIGMOID
        | {
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
        },
        qkv_bias="as said",
        qk_norm="as said",
        experts="routed",
        rotary_share=0.5,
    ),
    "dots1": Family(
        more="rms_norm_eps attention_bias sliding_window max_window_layers layer_types " + _ROUTED,
        defaults=_SIGMOID
        | {
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
        },
        qk_norm="always",
        windows="behind",
        experts="routed",
        fixed={"attention_bias": (False,)},
    ),
    "gpt_oss": Family(
        more="rms_norm_eps attention_bias sliding_window layer_types num_local_experts "
        "num_experts_per_tok swiglu_alpha swiglu_limit",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "attention_bias": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "rope_scaling": _GPT_OSS_YARN,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
        biased=True,
        windows="alternate",
        experts="gpt_oss",
        fixed={"attention_bias": (True,), "swiglu_alpha": (1.702,)},
    ),
    "mimo": Family(
        more="rms_norm_eps attention_bias use_mrope num_nextn_predict_layers " + _WINDOWS,
        defaults={"num_key_value_heads": 32},
        qkv_bias="as said",
        windows="behind",
        fixed={"use_sliding_window": (False,), "use_mrope": (False,)},
    ),
    "phi3": Family(
        more="rms_norm_eps sliding_window resid_pdrop embd_pdrop partial_rotary_factor "
        "original_max_position_embeddings",
        defaults={"rms_norm_eps": 1e-5},
        windows="all",
    ),
    "seed_oss": Family(
        more="rms_norm_eps attention_bias attention_out_bias mlp_bias residual_dropout",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "attention_bias": True,
            "attention_dropout": 0.1,
            "residual_dropout": 0.1,
        },
        qkv_bias="as said",
        fixed={"attention_out_bias": (False,), "mlp_bias": (False,)},
    ),
    "smollm3": Family(
        more=_LLAMA + "no_rope_layers no_rope_layer_interval " + _WINDOWS,
        defaults={"num_key_value_heads": 4, "rope_theta": 2e6},
        tied=True,
        fixed={**_NO_BIAS, "use_sliding_window": (False,)},
    ),
    "arcee": Family(
        more=_LLAMA,
        defaults={"rms_norm_eps": 1e-5, "hidden_act": "relu2"},
        activations=("relu2",),
        fixed=_NO_BIAS,
    ),
    "ernie4_5": Family(
        more="rms_norm_eps use_bias",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 5e5,
        },
        tied=True,
        interleaved=True,
        fixed={"use_bias": (False,)},
    ),
    "nemotron": Family(
        more="norm_eps partial_rotary_factor rope_percent attention_bias mlp_bias",
        defaults={"norm_eps": 1e-5, "hidden_act": "relu2", "initializer_range": 0.0134},
        activations=("relu2",),
        normalization="LayerNorm",
        layernorm_1p=True,
        rotary_share=0.5,
        fixed=_NO_BIAS,
    ),
    "stablelm": Family(
        more="layer_norm_eps use_qkv_bias qk_layernorm use_parallel_residual hidden_dropout "
        "partial_rotary_factor rope_pct",
        defaults={"num_key_value_heads": 32, "layer_norm_eps": 1e-5},
        normalization="LayerNorm",
        qkv_bias="as said",
        rotary_share=0.25,
        fixed={"qk_layernorm": (False,), "use_parallel_residual": (False,)},
    ),
    "starcoder2": Family(
        more="norm_epsilon sliding_window residual_dropout embedding_dropout use_bias "
        # Files carry two keys of GPT-BigCode that the class does not read.
        "activation_function layer_norm_epsilon",
        defaults={
            "num_key_value_heads": 2,
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "hidden_act": "gelu_pytorch_tanh",
            "initializer_range": 0.018042,
        },
        activations=("gelu_pytorch_tanh", "gelu"),
        normalization="LayerNorm",
        tied=True,
        biased=True,
        windows="all",
        fixed={"use_bias": (True,), "mlp_type": ("default",), "norm_type": ("layer_norm",)},
    ),
}
