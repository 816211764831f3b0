from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import FileFormatError, ModelError, UnsupportedError
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_layer": 12,
    "n_embd": 768,
    "n_head": 12,
    "n_positions": 1024,
}
NEOX: dict[str, Any] = {
    "model_type": "gpt_neox",
    "vocab_size": 50304,
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 8,
    "max_position_embeddings": 2048,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
}
OPT: dict[str, Any] = {
    "model_type": "opt",
    "vocab_size": 50272,
    "num_hidden_layers": 12,
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}
BATCH = ["--global-batch-size", "8", "--micro-batch-size", "1", "--seq-length", "1024"]


def _load(folder: Path, config: dict[str, Any], typed: list[str] = BATCH) -> Workload:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return load_workload(path, [*typed])


def test_llama_becomes_megatron_flags(tmp_path: Path) -> None:
    workload = _load(tmp_path, LLAMA)
    assert " ".join(workload.megatron_args) == (
        "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
        "--max-position-embeddings 8192 --group-query-attention --num-query-groups 8 --swiglu "
        "--disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-05 "
        "--attention-dropout 0.0 --hidden-dropout 0.0 "
        "--position-embedding-type rope --rotary-base 500000 "
        "--untie-embeddings-and-output-weights --vocab-size 128256 --bf16 "
        "--global-batch-size 8 --micro-batch-size 1 --seq-length 1024"
    )
    assert workload.source == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    ("config", "num_expected"),
    [
        # Published sizes of the checkpoints, exact; 128 divides each vocabulary but GPT-2's.
        (LLAMA, 8_030_261_248),
        (GPT2, 124_439_808 + (50304 - 50257) * 768),
        (NEOX, 1_011_781_632),
        # OPT has two positions more than its length, which its own code adds.
        (OPT, 125_239_296 - 2 * 768 + (50304 - 50272) * 768),
        (
            LLAMA | {"model_type": "mixtral", "vocab_size": 32000, "num_local_experts": 8,
                     "num_experts_per_tok": 2, "rope_theta": 1e6},
            46_702_792_704,
        ),
        (
            LLAMA | {"model_type": "mistral", "vocab_size": 32000, "head_dim": 128},
            7_241_732_096,
        ),
        (
            {
                "model_type": "qwen2", "vocab_size": 151936, "num_hidden_layers": 24,
                "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14,
                "num_key_value_heads": 2, "max_position_embeddings": 32768,
                "tie_word_embeddings": True, "rope_theta": 1000000.0,
            },
            494_032_768,
        ),
        (
            {
                "model_type": "qwen3", "vocab_size": 151936, "num_hidden_layers": 28,
                "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
                "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
                "tie_word_embeddings": True, "rope_theta": 1000000,
            },
            596_049_920,
        ),
        (
            {
                "model_type": "qwen3_moe", "vocab_size": 151936, "num_hidden_layers": 48,
                "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32,
                "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960,
                "tie_word_embeddings": False, "rope_theta": 1000000, "num_experts": 128,
                "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
            },
            30_532_122_624,
        ),
    ],
    ids=["llama3-8b", "gpt2", "pythia-1b", "opt-125m", "mixtral-8x7b", "mistral-7b",
         "qwen2-0.5b", "qwen3-0.6b", "qwen3-30b-a3b"],
)  # fmt: skip
def test_parameter_counts_are_those_of_the_published_models(
    tmp_path: Path, config: dict[str, Any], num_expected: int
) -> None:
    assert num_parameters(_load(tmp_path, config)) == num_expected


def test_what_megatron_does_differently_is_said(tmp_path: Path) -> None:
    assert "the activation is gelu, not relu" in _load(tmp_path, OPT).source
    assert "not in parallel" in _load(tmp_path, NEOX).source
    assert "differs" not in _load(tmp_path, NEOX | {"use_parallel_residual": False}).source


def test_precision_follows_the_file_unless_typed(tmp_path: Path) -> None:
    assert _load(tmp_path, LLAMA).training.precision == "bf16"
    assert _load(tmp_path, OPT).training.precision == "fp16"
    assert _load(tmp_path, GPT2).training.precision == "fp32"
    assert _load(tmp_path, OPT, [*BATCH, "--bf16"]).training.precision == "bf16"


@pytest.mark.parametrize(
    ("config", "attention", "hidden"),
    [
        (LLAMA, "0.0", "0.0"),
        (LLAMA | {"attention_dropout": 0.05}, "0.05", "0.0"),
        (NEOX, "0.0", "0.0"),
        (NEOX | {"attention_dropout": 0.2, "hidden_dropout": 0.3}, "0.2", "0.3"),
        (OPT, "0.0", "0.1"),
        (OPT | {"dropout": 0.0}, "0.0", "0.0"),
        (GPT2, "0.1", "0.1"),
        (GPT2 | {"attn_pdrop": 0.0, "resid_pdrop": 0.2}, "0.0", "0.2"),
    ],
)
def test_dropout_is_the_files_own_and_not_megatrons_default(
    tmp_path: Path, config: dict[str, Any], attention: str, hidden: str
) -> None:
    words = " ".join(_load(tmp_path, config).megatron_args)
    assert f"--attention-dropout {attention} --hidden-dropout {hidden}" in words
    typed = _load(tmp_path, config, [*BATCH, "--hidden-dropout", "0.5"]).megatron_args
    assert typed[typed.index("--hidden-dropout") + 1] == "0.5"


def test_dropout_that_megatron_cannot_tell_apart_is_noted(tmp_path: Path) -> None:
    assert "dropout after the embedding" in _load(tmp_path, GPT2 | {"embd_pdrop": 0.3}).source


def test_newer_files_keep_rope_in_one_place(tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k not in ("rope_theta", "torch_dtype")}
    config |= {"dtype": "bfloat16", "rope_parameters": {"rope_type": "llama3", "factor": 8.0,
               "rope_theta": 500000.0}}  # fmt: skip
    arguments = " ".join(_load(tmp_path, config).megatron_args)
    assert "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8.0" in arguments
    assert "--bf16" in arguments


def test_the_batch_must_be_typed(tmp_path: Path) -> None:
    all_three = (
        "--seq-length, --global-batch-size and --micro-batch-size are missing; a config.json has "
        "no such key: give them on our command line: -- --seq-length N --global-batch-size N "
        "--micro-batch-size N"
    )
    with pytest.raises(ModelError, match=re.escape(all_three)):
        _load(tmp_path, LLAMA, [])
    with pytest.raises(ModelError, match=r"json: --micro-batch-size is missing; a config"):
        _load(tmp_path, LLAMA, ["--seq-length", "2048", "--global-batch-size", "8"])


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (LLAMA | {"model_type": "llama4"}, ModelError, 'did you mean "llama"'),
        (
            {"model_type": "deepseek_v4", "kv_lora_rank": 512},
            ModelError,
            'did you mean "deepseek_v',
        ),
        ({"model_type": "x"}, ModelError, "supported are llama, mistral"),
        ({"vocab_size": 1}, ModelError, "this JSON names no model_type"),
        ([1], ModelError, "this JSON names no model_type, so it is no config.json"),
        (LLAMA | {"model_type": ["llama"]}, ModelError, "is not supported"),
        (LLAMA | {"hidden_size": "4096"}, ModelError, "hidden_size: input should be a valid int"),
        (LLAMA | {"hidden_size": 0}, ModelError, "hidden_size: input should be greater than"),
        ({"model_type": "gpt2"}, ModelError, 'the key "n_layer" is missing; add it'),
        (LLAMA | {"hidden_act": "relu"}, UnsupportedError, "hidden_act is 'relu'"),
        (LLAMA | {"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        (
            LLAMA | {"rope_scaling": {"rope_type": "longrope", "factor": 4.0}},
            UnsupportedError,
            'rope_scaling of type "longrope" is not supported',
        ),
        (LLAMA | {"rope_theta": 10000.5}, UnsupportedError, "is not a whole number"),
        (OPT | {"word_embed_proj_dim": 512}, UnsupportedError, "word_embed_proj_dim is 512"),
    ],
)
def test_refusals(tmp_path: Path, config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        _load(tmp_path, config)
    assert message in str(raised.value)
    assert "config.json:1" in str(raised.value)


def test_a_malformed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama",}')
    with pytest.raises(FileFormatError, match=r"config\.json:1: not valid JSON"):
        load_workload(path)
