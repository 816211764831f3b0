"""Hugging Face `config.json` to Megatron flags, read as plain data (no remote code, no library).

Only what the file says of the model is taken: the batch, the sequence length and how to train come
from the user's flags.
"""

from __future__ import annotations

from megatron_hetero.errors import ModelError, UnsupportedError
from megatron_hetero.files import Document, near_names, validate_document
from megatron_hetero.model.huggingface.config import (
    Gpt2Config,
    HuggingFaceConfig,
    LlamaConfig,
    NeoxConfig,
    OptConfig,
)
from megatron_hetero.model.huggingface.latent import LATENT_TYPES, LatentConfig, latent_flags
from megatron_hetero.model.huggingface.words import (
    dropout_flags,
    layer_flags,
    require,
    rms_norm_flags,
    rotary_flags,
    shape_flags,
)
from megatron_hetero.model.shell.values import Word

_LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
SUPPORTED_MODEL_TYPES = (*_LLAMA_LIKE, *LATENT_TYPES, "gpt_neox", "opt", "gpt2")

_PRECISION_FLAGS = {"bfloat16": ("--bf16",), "float16": ("--fp16",)}


def megatron_words_from_huggingface(document: Document) -> tuple[str, tuple[Word, ...]]:
    """Translate a `config.json` to its source (with the differences of Megatron's model) and its
    Megatron flags.

    Raises:
        ModelError: keys are missing or malformed, or the model type is not supported.
        UnsupportedError: the model has a part for which Megatron has no flag.
    """
    model_type = document.data.get("model_type") if isinstance(document.data, dict) else None
    differences: list[str] = []
    if model_type in _LLAMA_LIKE:
        llama = validate_document(document, LlamaConfig, ModelError)
        config: HuggingFaceConfig = llama
        flags = _llama_flags(document, llama)
    elif model_type == "gpt_neox":
        neox = validate_document(document, NeoxConfig, ModelError)
        config = neox
        flags = _neox_flags(neox, differences)
    elif model_type == "opt":
        opt = validate_document(document, OptConfig, ModelError)
        config = opt
        flags = _opt_flags(document, opt, differences)
    elif model_type == "gpt2":
        config = gpt2 = validate_document(document, Gpt2Config, ModelError)
        flags = _gpt2_flags(gpt2, differences)
    elif model_type in LATENT_TYPES:
        latent = validate_document(document, LatentConfig, ModelError)
        config = latent
        flags = latent_flags(document, latent, differences)
    else:
        hint = near_names(str(model_type), SUPPORTED_MODEL_TYPES)
        raise ModelError(
            f'{document.locate(["model_type"])}: model_type "{model_type}" is not supported{hint}; '
            f"supported are {', '.join(SUPPORTED_MODEL_TYPES)}. Any other GPT can be given by its "
            "Megatron flags"
        )
    flags += ["--vocab-size", str(config.vocab_size)]
    flags += _PRECISION_FLAGS.get(config.torch_dtype or "", ())
    where = document.locate([])
    note = f" (Megatron differs: {'; '.join(differences)})" if differences else ""
    return f"{document.path}{note}", tuple(Word(flag, where) for flag in flags)


def _llama_flags(document: Document, config: LlamaConfig) -> list[str]:
    require(document, "hidden_act", config.hidden_act, "silu")
    require(document, "mlp_bias", config.mlp_bias, False)
    if config.model_type != "qwen2":
        require(document, "attention_bias", config.attention_bias, False)
    num_groups = config.num_key_value_heads or config.num_attention_heads
    flags = shape_flags(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.max_position_embeddings,
    )
    if config.head_dim is not None:
        flags += ["--kv-channels", str(config.head_dim)]
    if num_groups != config.num_attention_heads:
        flags += ["--group-query-attention", "--num-query-groups", str(num_groups)]
    flags += ["--swiglu", "--disable-bias-linear"]
    flags += rms_norm_flags(config.rms_norm_eps)
    flags += dropout_flags(config.attention_dropout, 0.0)
    flags += _rope_flags(document, config)
    if config.model_type == "qwen2":
        flags.append("--add-qkv-bias")
    if config.model_type in ("qwen3", "qwen3_moe"):
        flags.append("--qk-layernorm")
    if config.model_type == "qwen3_moe":
        flags += _qwen3_experts(document, config)
    if config.model_type == "mixtral":
        flags += ["--num-experts", str(config.num_local_experts or 8)]
        flags += ["--moe-router-topk", str(config.num_experts_per_tok or 2)]
    if config.output_router_logits and config.router_aux_loss_coef:
        # Without the logits Hugging Face's own training has no such loss either.
        flags += ["--moe-router-load-balancing-type", "aux_loss"]
        flags += ["--moe-aux-loss-coeff", repr(config.router_aux_loss_coef)]
    # Both families write the key wherever it is true; its default in their code is False.
    if not config.tie_word_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


def _qwen3_experts(document: Document, config: LlamaConfig) -> list[str]:
    step, dense = config.decoder_sparse_step, set(config.mlp_only_layers)
    pattern = [
        int((layer + 1) % step == 0 and layer not in dense)
        for layer in range(config.num_hidden_layers)
    ]
    flags = ["--num-experts", str(config.num_local_experts or 128)]
    flags += ["--moe-router-topk", str(config.num_experts_per_tok or 8)]
    flags += ["--moe-ffn-hidden-size", str(config.moe_intermediate_size or 768)]
    flags += layer_flags(pattern)
    if not config.norm_topk_prob:
        # The chosen experts' weights keep the size that they have among all.
        flags.append("--moe-router-pre-softmax")
    return flags


def _rope_flags(document: Document, config: LlamaConfig) -> list[str]:
    """Translate position embeddings to flags; newer files keep theta and scaling together in
    `rope_parameters`."""
    parameters = config.rope_parameters or {}
    theta = config.rope_theta or parameters.get("rope_theta") or 10000.0
    scaling = config.rope_scaling or parameters
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    key = "rope_scaling" if config.rope_scaling else "rope_parameters"
    flags = rotary_flags(document, theta)
    if kind == "llama3":
        flags += ["--use-rope-scaling", "--rope-scaling-factor", str(scaling.get("factor", 8.0))]
    elif kind != "default":
        raise UnsupportedError(
            f'{document.locate([key])}: {key} of type "{kind}" is not supported yet; remove it, or '
            "describe the model by Megatron flags"
        )
    return flags


def _neox_flags(config: NeoxConfig, differences: list[str]) -> list[str]:
    if config.use_parallel_residual:
        differences.append("attention and MLP run one after the other, not in parallel")
    _note_activation(config.hidden_act, differences)
    flags = shape_flags(
        config.num_hidden_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.max_position_embeddings,
    )
    flags += ["--position-embedding-type", "rope", "--rotary-percent", repr(config.rotary_pct)]
    flags += ["--rotary-base", str(int(config.rotary_emb_base))]
    flags += ["--norm-epsilon", repr(config.layer_norm_eps)]
    flags += dropout_flags(config.attention_dropout, config.hidden_dropout)
    if not config.tie_word_embeddings:
        flags.append("--untie-embeddings-and-output-weights")
    return flags


def _opt_flags(document: Document, config: OptConfig, differences: list[str]) -> list[str]:
    projection = config.word_embed_proj_dim or config.hidden_size
    require(document, "word_embed_proj_dim", projection, config.hidden_size)
    require(document, "do_layer_norm_before", config.do_layer_norm_before, True)
    require(document, "enable_bias", config.enable_bias, True)
    _note_activation(config.activation_function, differences)
    flags = shape_flags(
        config.num_hidden_layers,
        config.hidden_size,
        config.ffn_dim,
        config.num_attention_heads,
        config.max_position_embeddings,
    )
    flags += dropout_flags(config.attention_dropout, config.dropout)
    return flags + _untied_flag(config)


def _gpt2_flags(config: Gpt2Config, differences: list[str]) -> list[str]:
    _note_activation(config.activation_function, differences)
    flags = shape_flags(
        config.n_layer,
        config.n_embd,
        config.n_inner or 4 * config.n_embd,
        config.n_head,
        config.n_positions,
    )
    if config.embd_pdrop != config.resid_pdrop:
        differences.append(
            f"dropout after the embedding is resid_pdrop {config.resid_pdrop}, not embd_pdrop "
            f"{config.embd_pdrop}"
        )
    flags += ["--norm-epsilon", repr(config.layer_norm_epsilon)]
    flags += dropout_flags(config.attn_pdrop, config.resid_pdrop)
    return flags + _untied_flag(config)


def _untied_flag(config: HuggingFaceConfig) -> list[str]:
    """Return the flag of untied embeddings where the file asks for it; OPT and GPT-2 tie them by
    default."""
    return ["--untie-embeddings-and-output-weights"] if config.tie_word_embeddings is False else []


def _note_activation(activation: str, differences: list[str]) -> None:
    """Note an activation other than gelu, Megatron's without a flag; shape and cost are the
    same."""
    if not activation.startswith("gelu"):
        differences.append(f"the activation is gelu, not {activation}")
