"""Keys that change a model in a way that a size does not show: windows, rotation, and unknowns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import HeteroError, ModelError, UnsupportedError
from megatron_hetero.model.load import load_arguments, load_workload
from tests.timing import assert_within

BATCH = ["--seq-length", "1024", "--global-batch-size", "8", "--micro-batch-size", "1"]
MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 32000,
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 14,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
    "sliding_window": 4096, "use_sliding_window": True, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 152064,
}  # fmt: skip
NEOX: dict[str, Any] = {
    "model_type": "gpt_neox", "vocab_size": 32000, "num_hidden_layers": 36, "hidden_size": 2816,
    "intermediate_size": 11264, "num_attention_heads": 22, "max_position_embeddings": 2048,
    "hidden_act": "gelu", "layer_norm_eps": 1e-05, "use_parallel_residual": False,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA = {
    key: value for key, value in MISTRAL.items() if key not in ("sliding_window", "architectures")
} | {"model_type": "llama"}


def words(folder: Path, config: dict[str, Any]) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config, indent=1))
    return " ".join(word for a in load_arguments(path).arguments for word in a.words or ())


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (MISTRAL, "--window-size 4095,0"),
        (MISTRAL | {"sliding_window": None}, ""),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, "--window-size 4095,0"),
        (
            MISTRAL | {"layer_types": ["sliding_attention", "full_attention"] * 16},
            "--window-size 4095,0 --window-attn-skip-freq " + "+".join(["[1]*1", "[0]*1"] * 16),
        ),
        (QWEN2, "--window-size 4095,0 --window-attn-skip-freq [0]*14+[1]*14"),
        (QWEN2 | {"use_sliding_window": False}, ""),
        (QWEN2 | {"max_window_layers": 28}, ""),
        (QWEN2 | {"max_window_layers": 0}, "--window-size 4095,0"),
        (
            QWEN2 | {"layer_types": ["full_attention"] * 20 + ["sliding_attention"] * 8},
            "--window-size 4095,0 --window-attn-skip-freq [0]*20+[1]*8",
        ),
        (QWEN2 | {"model_type": "qwen3"},
         "--window-size 4095,0 --window-attn-skip-freq [0]*14+[1]*14"),
    ],
)  # fmt: skip
def test_windows(config: dict[str, Any], flags: str, tmp_path: Path) -> None:
    said = words(tmp_path, config)
    assert (flags in said) if flags else ("--window" not in said)


@pytest.mark.parametrize(
    ("keys", "flags"),
    [
        ({"rotary_pct": 1.0, "rotary_emb_base": 10000, "torch_dtype": "float16"},
         "--rotary-percent 1.0 --rotary-base 10000"),
        ({"rope_parameters": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0,
                              "rope_type": "default"}, "dtype": "float16"},
         "--rotary-percent 1.0 --rotary-base 10000"),
        ({}, "--rotary-percent 0.25 --rotary-base 10000"),
        ({"rope_parameters": {"rope_theta": 20000, "rope_type": "default"}},
         "--rotary-percent 0.25 --rotary-base 20000"),
        ({"rotary_pct": 0.5, "rope_scaling": {"type": "linear", "factor": 2.0}},
         "--rotary-percent 0.5 --rotary-base 10000 --rotary-seq-len-interpolation-factor 2"),
        ({"rope_theta": 30000, "partial_rotary_factor": 0.125},
         "--rotary-percent 0.125 --rotary-base 30000"),
    ],
)  # fmt: skip
def test_rotation_of_neox_in_both_forms(keys: dict[str, Any], flags: str, tmp_path: Path) -> None:
    assert flags in words(tmp_path, NEOX | keys)


GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "vocab_size": 151552, "num_hidden_layers": 46, "hidden_size": 4096,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "partial_rotary_factor": 0.5, "hidden_act": "silu",
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 1000000,
    "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "first_k_dense_replace": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "tie_word_embeddings": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "flags", "absent"),
    [
        ({}, "--num-experts 128 --moe-ffn-hidden-size 1408 --moe-router-topk 8 "
             "--moe-layer-freq [0]*1+[1]*45 --moe-shared-expert-intermediate-size 1408",
         "--qk-layernorm"),
        ({"first_k_dense_replace": 3}, "--moe-layer-freq [0]*3+[1]*43", "[0]*1"),
        ({"use_qk_norm": True}, "--qk-layernorm", "--window-size"),
        ({"routed_scaling_factor": 2.5}, "--moe-router-topk-scaling-factor 2.5", "--num-groups"),
        ({"n_shared_experts": 2}, "--moe-shared-expert-intermediate-size 2816", " 1408 --moe-sh"),
        ({"n_group": 8, "topk_group": 4}, "--moe-router-num-groups 8 --moe-router-group-topk 4",
         "--qk-layernorm"),
        ({"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                              "rope_type": "default"}}, "--rotary-percent 0.25", "percent 0.5"),
    ],
)  # fmt: skip
def test_experts_of_glm(
    keys: dict[str, Any], flags: str, absent: str, tmp_path: Path
) -> None:
    said = words(tmp_path, GLM | keys)
    assert flags in said and absent not in said
    assert "--moe-router-score-function sigmoid" in said and "--add-qkv-bias" in said


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        (LLAMA | {"rope_scaling": YARN},
         "--position-embedding-type yarn --rotary-base 10000 --rotary-scaling-factor 4.0 "
         "--yarn-original-max-position-embeddings 32768"),
        (LLAMA | {"rope_parameters": {**YARN, "rope_theta": 5e5, "truncate": False}},
         "--rotary-base 500000 --rotary-scaling-factor 4.0 "
         "--yarn-original-max-position-embeddings 32768 --no-yarn-correction-range-round-to-int"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 4.0}},
         "--position-embedding-type rope --rotary-base 10000 "
         "--rotary-seq-len-interpolation-factor 4"),
        (LLAMA | {"rope_parameters": {"rope_type": "llama3", "factor": 32.0, "rope_theta": 5e5,
                                      "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                      "original_max_position_embeddings": 8192}},
         "--use-rope-scaling --rope-scaling-factor 32.0"),
        (LLAMA | {"rope_scaling": {"rope_type": "default"}}, "--position-embedding-type rope"),
    ],
)  # fmt: skip
def test_scaling_in_both_forms(config: dict[str, Any], flags: str, tmp_path: Path) -> None:
    assert flags in words(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
         "json:21: layer_types names 2 layers; num_hidden_layers is 28"),
        (MISTRAL | {"layer_types": ["chunked"] * 32}, "layer_types is 'chunked'"),
        (QWEN2 | {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 28},
         "has sliding_attention, but use_sliding_window is false"),
        (LLAMA | {"sliding_window": 4096}, "json:17: sliding_window is 4096\nthis key of a llama"),
        (LLAMA | {"clip_qkv": 8.0}, "clip_qkv is 8.0"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (LLAMA | {"embedding_multiplier": 12.0, "logits_scaling": 8.0},
         "json:17: embedding_multiplier is 12.0\n"),
        (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
         'json:17: rope_scaling of type "dynamic" is not supported'),
        (LLAMA | {"rope_scaling": {**YARN, "attention_factor": 2.0}},
         "rope_scaling.attention_factor is 2.0; Megatron's is 1.13863"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.5}}, "is by integers"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8, "high_freq_factor": 8.0}},
         "high_freq_factor is 8.0; Megatron's rope scaling has 4.0"),
        (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "has to be a number"),
        (LLAMA | {"rope_scaling": {"full": {"rope_type": "yarn"}}}, "of some layers alone"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "scale": 2}}, "is not known of a"),
        (NEOX | {"attention_bias": False}, "attention_bias is False"),
    ],
)  # fmt: skip
def test_refusals_name_the_line(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as raised:
        words(tmp_path, config)
    assert message in str(raised.value)


def test_errors_of_flags_end_at_the_line_of_the_key(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | {"num_attention_heads": 33, "head_dim": None}, indent=1))
    with pytest.raises(ModelError, match=r"config\.json:11: --num-query-groups 8 does not divide"):
        load_workload(path, BATCH)


def test_keys_that_say_nothing(tmp_path: Path) -> None:
    more = {"unsloth_version": "1", "auto_map": {"AutoConfig": "x.Y"}, "eos_token_id": [1, 2],
            "max_window_layers": 3, "use_sliding_window": False, "an_unknown_one": None,
            "mlp_gated_linear_units": True, "pretraining_tp": 4}  # fmt: skip
    assert words(tmp_path, LLAMA | more) == words(tmp_path, LLAMA)
    assert "--init-method-std 0.006" in words(tmp_path, LLAMA | {"initializer_range": 0.006})


def test_a_folder_with_its_tokenizer(tmp_path: Path) -> None:
    words(tmp_path, LLAMA)
    tokenizer = {"model": {"vocab": {f"t{i}": i for i in range(100)}},
                 "added_tokens": [{"content": "<s>"}]}  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    job = load_workload(tmp_path, BATCH)
    assert job.model.vocab_size == 32000
    assert "its tokenizer has 101 tokens, the embedding 32000 rows" in job.source
    words(tmp_path, LLAMA | {"vocab_size": 100})
    with pytest.raises(ModelError, match=r"config\.json:16: vocab_size is 100, and the tokenizer"):
        load_workload(tmp_path, BATCH)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="vocabulary cannot be counted"):
        load_workload(tmp_path, BATCH)
    (tmp_path / "tokenizer.json").unlink()
    assert load_workload(tmp_path, BATCH).model.vocab_size == 100
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_workload(tmp_path, BATCH)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA | {f"key_{i}": i for i in range(100_000)},
        LLAMA | {"model_type": "x" * 10_000},
        LLAMA | {"k" * 10_000: 1},
        LLAMA | {"rope_scaling": {"rope_type": "y" * 10_000}},
        LLAMA | {"hidden_act": "z" * 10_000},
    ],
    ids=["100,000 keys", "long family", "long key", "long kind", "long value"],
)
def test_large_files_are_answered_at_once(config: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))

    def refused() -> None:
        with pytest.raises(HeteroError) as raised:
            load_workload(path, BATCH)
        assert len(str(raised.value)) < 3000

    assert_within(2, refused)
