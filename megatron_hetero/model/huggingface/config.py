"""The keys of a Hugging Face `config.json`, by family of models; defaults are those of the
families' own classes in `transformers`."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

_HARMLESS = """
    _attn_implementation _flash_attn_2_enabled _name_or_path _num_labels adapters architectures
    attention_softmax_in_fp32 attn_implementation auto_map aux_loss_alpha bad_words_ids
    begin_suppress_tokens bos_token bos_token_id chunk_size_feed_forward classifier_dropout
    custom_pipelines decoder_start_token_id diversity_penalty do_sample early_stopping
    encoder_no_repeat_ngram_size eos_token eos_token_id ep_size experts_per_token
    exponential_decay_length_penalty finetuning_task forced_bos_token_id forced_eos_token_id
    generation_config gradient_checkpointing hidden_states_dtype id2label inference_runner
    initial_context_length is_decoder is_encoder_decoder is_llama_config is_reference_model
    keys_to_ignore_at_inference label2id length_penalty license max_batch_size max_length
    max_new_tokens max_sequence_length min_length model_max_length moe_router_dtype
    mtp_loss_weight n_ctx name no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token pad_token_id prefix prefix_token_id pretraining_tp problem_type
    pruned_heads remove_invalid_values reorder_and_upcast_attn repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef scale_attention_softmax_in_fp32 sep_token_id
    seq_aux summary_activation summary_first_dropout summary_proj_to_labels summary_type
    summary_use_proj suppress_tokens task_specific_params temperature tf_legacy_loss
    tie_encoder_decoder tokenizer_class tokenizer_model_max_length top_k top_p torchscript
    transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_flash_attention use_flash_attn
    validate_runner_input
"""
HARMLESS_KEYS = frozenset(_HARMLESS.split())
"""Keys without effect on the trained model: about generation, tokens, classification, how
`transformers` computes the same numbers, or how that trains (its auxiliary loss)."""

NEUTRAL_VALUES: dict[str, tuple[object, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "clip_qkv": (),
    "embd_pdrop": (0.0,),
    "embedding_dropout": (0.0,),
    "expert_bias": (False,),
    "input_jitter_noise": (0.0,),
    "layer_norm_elementwise_affine": (True,),
    "layerdrop": (0.0,),
    "lm_head_bias": (False,),
    "mlp_bias": (False,),
    "mlp_gated_linear_units": (True,),
    "mtp_num_layers": (0,),
    "num_nextn_predict_layers": (0,),
    "partial_rotary_factor": (1.0,),
    "resid_pdrop": (0.0,),
    "residual_dropout": (0.0,),
    "rope_interleave": (True,),
    "rope_interleaved": (False,),
    "router_jitter_noise": (0.0,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "sliding_window": (),
    "use_bias": (False,),
    "use_mrope": (False,),
    "use_parallel_residual": (False,),
    "use_qk_norm": (False,),
    "use_sliding_window": (False,),
    "_remove_final_layer_norm": (False,),
}
"""Values of a key that change nothing in a family without the key; null is allowed for all keys."""


class HuggingFaceConfig(BaseModel):
    """The keys that every family has."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    model_type: str
    vocab_size: int = Field(ge=1)
    torch_dtype: str | None = Field(None, validation_alias=AliasChoices("torch_dtype", "dtype"))
    tie_word_embeddings: bool | None = None
    quantization_config: dict[str, Any] | None = None
    initializer_range: float = Field(0.02, gt=0)


class RotaryKeys(BaseModel):
    """Keys of rotary positions, as `transformers` 4 and 5 write them."""

    rope_theta: float | None = Field(
        None, gt=0, validation_alias=AliasChoices("rope_theta", "rotary_emb_base")
    )
    partial_rotary_factor: float | None = Field(
        None,
        gt=0,
        le=1,
        validation_alias=AliasChoices(
            "partial_rotary_factor", "rotary_pct", "rope_pct", "rope_percent"
        ),
    )
    rope_scaling: dict[str, Any] | None = None
    rope_parameters: dict[str, Any] | None = None


class RoutedKeys(BaseModel):
    """Keys of experts as DeepSeek's families and GLM have them."""

    n_routed_experts: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("n_routed_experts", "num_local_experts")
    )
    n_shared_experts: int | None = Field(None, ge=0)
    num_experts_per_tok: int | None = Field(None, ge=1)
    moe_intermediate_size: int | None = Field(None, ge=1)
    moe_layer_freq: int = Field(1, ge=1)
    first_k_dense_replace: int = Field(0, ge=0)
    mlp_layer_types: list[str] | None = None
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: int | None = Field(None, ge=1)
    topk_group: int | None = Field(None, ge=1)
    norm_topk_prob: bool = False
    routed_scaling_factor: float | None = 1.0
    num_nextn_predict_layers: int | None = Field(None, ge=0)


class DecoderConfig(HuggingFaceConfig, RotaryKeys, RoutedKeys):
    """Keys of Llama and whatever is built like it; which of them a family reads is in `families`.

    Attention biases are read as `attention_bias`, `use_qkv_bias` or `qkv_bias`; the epsilon of a
    norm under the name of each family.
    """

    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    max_position_embeddings: int = Field(ge=1)
    hidden_act: str = "silu"
    norm_eps: float = Field(
        1e-6,
        gt=0,
        validation_alias=AliasChoices("rms_norm_eps", "norm_eps", "norm_epsilon", "layer_norm_eps"),
    )
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    hidden_dropout: float = Field(
        0.0,
        ge=0,
        lt=1,
        validation_alias=AliasChoices("hidden_dropout", "residual_dropout", "resid_pdrop"),
    )
    embedding_dropout: float = Field(
        0.0, ge=0, lt=1, validation_alias=AliasChoices("embedding_dropout", "embd_pdrop")
    )
    attention_bias: bool = Field(
        False, validation_alias=AliasChoices("attention_bias", "use_qkv_bias", "qkv_bias")
    )
    attention_out_bias: bool = False
    mlp_bias: bool = False
    use_bias: bool = False
    use_qk_norm: bool = False
    qk_layernorm: bool = False
    use_parallel_residual: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = Field(None, ge=0)
    max_window_layers: int | None = Field(None, ge=0)
    layer_types: list[str] | None = None
    no_rope_layers: list[int] | None = None
    no_rope_layer_interval: int = Field(4, ge=1)
    num_experts: int | None = Field(
        None, ge=1, validation_alias=AliasChoices("num_local_experts", "num_experts")
    )
    shared_expert_intermediate_size: int | None = Field(None, ge=0)
    decoder_sparse_step: int = Field(1, ge=1)
    mlp_only_layers: list[int] = []
    swiglu_alpha: float = 1.702
    swiglu_limit: float = Field(7.0, gt=0)
    output_router_logits: bool = False
    router_aux_loss_coef: float | None = Field(None, ge=0)


class LatentConfig(HuggingFaceConfig, RotaryKeys, RoutedKeys):
    """Keys of models with multi-latent attention and, but for the first layers, experts."""

    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int | None = Field(None, ge=1)
    max_position_embeddings: int = Field(ge=1)
    q_lora_rank: int | None = Field(None, ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=1)
    qk_head_dim: int | None = Field(None, ge=1)
    head_dim: int | None = Field(None, ge=1)
    v_head_dim: int = Field(ge=1)
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(1e-6, gt=0)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    attention_bias: bool = False
    rope_interleave: bool = True


class NeoxConfig(HuggingFaceConfig, RotaryKeys):
    """Keys of GPT-NeoX and Pythia."""

    num_hidden_layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    max_position_embeddings: int = Field(ge=1)
    hidden_act: str = "gelu"
    layer_norm_eps: float = Field(1e-5, gt=0)
    attention_dropout: float = Field(0.0, ge=0, lt=1)
    hidden_dropout: float = Field(0.0, ge=0, lt=1)
    use_parallel_residual: bool = True
    attention_bias: bool = True


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
    activation_dropout: float = Field(0.0, ge=0, lt=1)
    dropout: float = Field(0.1, ge=0, lt=1)
    do_layer_norm_before: bool = True
    enable_bias: bool = True
    init_std: float = Field(0.02, gt=0)


class Gpt2Config(HuggingFaceConfig):
    """Keys of GPT-2 and of GPT-BigCode, whose heads share a single key and value."""

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
    multi_query: bool = True
    num_key_value_heads: int | None = Field(None, ge=1)
