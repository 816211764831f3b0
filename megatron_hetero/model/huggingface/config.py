"""The keys of a Hugging Face `config.json` that decide a model's shape, by family of models."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field


class HuggingFaceConfig(BaseModel):
    """The keys that decide the shape; a config has many more, about generation and tokens."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    model_type: str
    vocab_size: int = Field(ge=1)
    torch_dtype: str | None = Field(None, validation_alias=AliasChoices("torch_dtype", "dtype"))
    tie_word_embeddings: bool | None = None


class LlamaConfig(HuggingFaceConfig):
    """Keys of Llama, Mistral, Qwen 2 and 3, Mixtral and Qwen 3 MoE."""

    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    max_position_embeddings: int = Field(ge=1)
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(1e-6, gt=0)
    rope_theta: float | None = Field(None, gt=0)
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    attention_bias: bool = False
    mlp_bias: bool = False
    num_local_experts: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("num_local_experts", "num_experts")
    )
    num_experts_per_tok: int | None = Field(None, ge=1)
    moe_intermediate_size: int | None = Field(None, ge=1)
    norm_topk_prob: bool = False
    decoder_sparse_step: int = Field(1, ge=1)
    mlp_only_layers: list[int] = []
    output_router_logits: bool = False
    router_aux_loss_coef: float | None = Field(None, ge=0)


class NeoxConfig(HuggingFaceConfig):
    """Keys of GPT-NeoX and Pythia."""

    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    hidden_act: str = "gelu"
    layer_norm_eps: float = Field(1e-5, gt=0)
    rotary_pct: float = Field(0.25, gt=0, le=1)
    rotary_emb_base: float = Field(10000.0, gt=0)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    use_parallel_residual: bool = True


class OptConfig(HuggingFaceConfig):
    """Keys of OPT."""

    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    ffn_dim: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    word_embed_proj_dim: int | None = Field(None, ge=1)
    activation_function: str = "relu"
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    do_layer_norm_before: bool = True
    enable_bias: bool = True


class Gpt2Config(HuggingFaceConfig):
    """Keys of GPT-2."""

    n_layer: int = Field(ge=1)
    n_embd: int = Field(ge=1)
    n_inner: int | None = Field(None, ge=1)
    n_head: int = Field(ge=1)
    n_positions: int = Field(ge=1)
    activation_function: str = "gelu_new"
    attn_pdrop: float = Field(0.1, ge=0, lt=1)
    embd_pdrop: float = Field(0.1, ge=0, lt=1)
    resid_pdrop: float = Field(0.1, ge=0, lt=1)
    layer_norm_epsilon: float = Field(1e-5, gt=0)
