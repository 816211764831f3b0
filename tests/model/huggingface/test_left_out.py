"""A key that a `config.json` leaves out is what its family's class takes for it.

`class_defaults.json` has what the classes of `transformers` 5.24.0 take; those that only keep a
family from being read (sizes that a file has to give) are not in it, nor is the weight of the
balancing loss, which a class adds only where asked and a job has to say (`init --job`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import HeteroError, UnsupportedError
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.model.huggingface.translate import SUPPORTED_MODEL_TYPES
from megatron_hetero.model.load import load_workload

DEFAULTS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "class_defaults.json").read_text()
)
# Families of no class in transformers.
REMOTE = {"mimo", "kimi_k2"}
BATCH = ["--seq-length", "1024", "--global-batch-size", "8", "--micro-batch-size", "1"]
SIZES = {
    "vocab_size": 32000,
    "num_hidden_layers": 70,
    "hidden_size": 8192,
    "intermediate_size": 9000,
    "num_attention_heads": 64,
    "max_position_embeddings": 4096,
}
LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
OLDER = {"vocab_size": 32000, "n_layer": 4, "n_embd": 512, "n_head": 8, "n_positions": 1024}
# What a file of these families has to give, as no number of it is a class's.
ROUTED = {
    "dots1": {"n_routed_experts": 64, "num_experts_per_tok": 6, "norm_topk_prob": True},
    "deepseek_v2": {"num_experts_per_tok": 6},
}


def _sizes(family: str) -> dict[str, Any]:
    if family in ("gpt2", "gpt_bigcode"):
        return OLDER
    if family == "opt":
        sizes = {**SIZES, "ffn_dim": 9000}
        del sizes["intermediate_size"]
        return sizes
    latent = LATENT if "q_lora_rank" in DEFAULTS[family] else {}
    return {**SIZES, **latent, **ROUTED.get(family, {})}


def _read(folder: Path, config: dict[str, Any]) -> tuple[tuple[str, ...], str, int]:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    job = load_workload(path, BATCH, is_planned=False)
    return tuple(job.megatron_args), job.source, num_parameters(job)


def test_every_family_of_a_class_is_here() -> None:
    assert set(DEFAULTS) == set(SUPPORTED_MODEL_TYPES) - REMOTE


@pytest.mark.parametrize("family", DEFAULTS)
def test_a_key_left_out_is_the_default_of_its_class(family: str, tmp_path: Path) -> None:
    whole = {"model_type": family, **DEFAULTS[family], **_sizes(family)}
    expected = _read(tmp_path, whole)
    for key in set(DEFAULTS[family]) - set(_sizes(family)):
        left = {name: value for name, value in whole.items() if name != key}
        assert _read(tmp_path, left) == expected, key
    assert _read(tmp_path, {"model_type": family, **_sizes(family)}) == expected


def test_experts_under_their_other_name_beat_the_default(tmp_path: Path) -> None:
    base = {"model_type": "glm4_moe", **_sizes("glm4_moe")}
    few = _read(tmp_path, {**base, "num_local_experts": 16})
    assert few == _read(tmp_path, {**base, "n_routed_experts": 16})
    assert few[2] < _read(tmp_path, base)[2]


def test_a_key_that_the_class_does_not_read_is_no_other_name(tmp_path: Path) -> None:
    base = {"model_type": "qwen2_moe", **_sizes("qwen2_moe")}
    assert _read(tmp_path, {**base, "attention_bias": False}) == _read(tmp_path, base)
    with pytest.raises(UnsupportedError, match="num_local_experts is 8"):
        _read(tmp_path, {**base, "num_local_experts": 8})


def test_newer_rotary_parameters_beat_the_default_scaling(tmp_path: Path) -> None:
    base = {"model_type": "gpt_oss", **_sizes("gpt_oss")}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    arguments, *_ = _read(tmp_path, {**base, "rope_parameters": plain})
    assert "yarn" not in arguments
    assert arguments[arguments.index("--rotary-base") + 1] == "10000"


def test_heads_that_a_default_does_not_divide_are_refused_with_the_key(tmp_path: Path) -> None:
    config = {"model_type": "qwen2", **SIZES, "num_attention_heads": 16}
    with pytest.raises(
        UnsupportedError,
        match="num_key_value_heads is 32, as in a file without the key, and does not divide "
        "num_attention_heads 16; add the key",
    ):
        _read(tmp_path, config)


@pytest.mark.parametrize("family", ROUTED)
def test_experts_of_a_token_have_to_be_given(family: str, tmp_path: Path) -> None:
    config = {"model_type": family, **_sizes(family)}
    del config["num_experts_per_tok"]
    with pytest.raises(HeteroError, match="num_experts_per_tok is missing; add it"):
        _read(tmp_path, config)
