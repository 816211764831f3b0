"""Configurations of public models: what they say, against the sizes that are published.

`published.json` has the keys of each model's `config.json` (those of remote code, and the tables of
quantized ones, left out) and the parameters of its weights, counted with `transformers` on its own
classes; layers that predict further tokens are not among them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import HeteroError, ModelError
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.model.huggingface.config import HARMLESS_KEYS
from megatron_hetero.model.huggingface.families import FAMILIES
from megatron_hetero.model.load import load_workload

PUBLISHED: list[dict[str, Any]] = json.loads((Path(__file__).parent / "published.json").read_text())
BATCH = ["--seq-length", "1024", "--global-batch-size", "8", "--micro-batch-size", "1"]
# OPT has two rows of positions more than its length, of which Megatron has no flag.
LESS = {"facebook/opt-1.3b": 2 * 2048, "facebook/opt-13b": 2 * 5120}
# Figures that their authors state, rounded as they are there.
STATED = {
    "mistralai/Mistral-7B-v0.1": 7.24e9,
    "Qwen/Qwen2.5-7B": 7.61e9,
    "Qwen/Qwen1.5-MoE-A2.7B": 14.3e9,
    "Qwen/Qwen3-235B-A22B": 235e9,
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": 480e9,
    "rednote-hilab/dots.llm1.base": 142.8e9,
    "HuggingFaceTB/SmolLM3-3B": 3.08e9,
    "baidu/ERNIE-4.5-0.3B-PT": 0.361e9,
    "bigcode/starcoder2-3b": 3.03e9,
    "bigcode/starcoder": 15.5e9,
    "microsoft/Phi-3-mini-4k-instruct": 3.82e9,
    "microsoft/phi-4": 14.7e9,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "deepseek-ai/DeepSeek-V2": 235.7e9,
    "deepseek-ai/DeepSeek-V3": 671e9,
    "meta-llama/Llama-2-70b-hf": 69e9,
    "meta-llama/Meta-Llama-3.1-405B": 405.85e9,
    "mistralai/Mixtral-8x7B-v0.1": 46.7e9,
    "moonshotai/Moonlight-16B-A3B": 15.96e9,
    "openai/gpt-oss-120b": 116.83e9,
    "openai/gpt-oss-20b": 20.91e9,
    "openai-community/gpt2-xl": 1.5576e9,
}
REFUSED = (
    "bloom deepseek_v32 deepseek_v4 falcon gemma4 glm_moe_dsa gpt_neo gptj kimi_k25 llama4 "
    "mimo_v2_flash minimax_m2 minimax_m3 nemotron-nas nemotron_h qwen3_5 qwen3_5_moe qwen3_vl "
    "qwen3_vl_moe step3p7"
)


def test_there_are_many() -> None:
    assert len(PUBLISHED) >= 40


def test_every_family_has_a_published_configuration() -> None:
    assert set(FAMILIES) <= {model["config"]["model_type"] for model in PUBLISHED}
    assert len({model["config"]["model_type"] for model in PUBLISHED}) >= 25


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: str(model["name"]))
def test_parameters_are_those_of_the_weights(model: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(model["config"]))
    job = load_workload(path, [*BATCH, "--make-vocab-size-divisible-by", "1"])
    assert num_parameters(job) == model["parameters"] - LESS.get(model["name"], 0)
    if model["name"] in STATED:
        assert num_parameters(job) == pytest.approx(STATED[model["name"]], rel=0.005)


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: str(model["name"]))
def test_every_number_counts_or_is_refused(model: dict[str, Any], tmp_path: Path) -> None:
    """Another value of any key changes the flags, or the differences, or is refused: nothing is
    passed over but what is known to change nothing."""
    path = tmp_path / "config.json"
    config = model["config"]

    def read(changed: dict[str, Any]) -> object:
        path.write_text(json.dumps(changed))
        try:
            job = load_workload(path, BATCH)
        except Exception as error:
            return str(error)
        return job.megatron_args, job.source

    before = read(config)
    silent = []
    for key, value in config.items():
        if key in HARMLESS_KEYS or isinstance(value, str | list | dict) or value is None:
            continue
        other = (not value) if isinstance(value, bool) else value * 2 + 1
        if read({**config, key: other}) == before:
            silent.append(key)
    # What follows from other keys, or what the family's own class does not read.
    off = config.get("use_sliding_window") is False
    past = off and config.get("max_window_layers", 0) >= config["num_hidden_layers"]
    may_be_silent = {
        "activation_function", "layer_norm_epsilon", "original_max_position_embeddings",
        "shared_expert_intermediate_size", "no_rope_layer_interval",
        *(("sliding_window", "max_window_layers") if off else ()),
        *(("num_key_value_heads", "head_dim", "qk_head_dim") if "kv_lora_rank" in config else ()),
        *(("n_group", "topk_group") if config.get("n_group") == 1 else ()),
        *(("use_sliding_window",) if config.get("sliding_window") is None or past else ()),
    }  # fmt: skip
    assert set(silent) <= may_be_silent


@pytest.mark.parametrize(
    "model",
    {model["config"]["model_type"]: model for model in PUBLISHED}.values(),
    ids=lambda model: str(model["config"]["model_type"]),
)
def test_refusals_end_at_the_line_of_a_key(model: dict[str, Any], tmp_path: Path) -> None:
    """Whatever value a key gets, the fault is at its line, or at that of a key that it contradicts:
    never at the first line of the file."""
    path, config = tmp_path / "config.json", model["config"]
    for key in config:
        for value in ("x", -1, 7, [1]):
            text = json.dumps({**config, key: value}, indent=1)
            path.write_text(text)
            try:
                load_workload(path, BATCH)
            except HeteroError as error:
                found = re.match(r".*config\.json:(\d+): ", str(error))
                assert found is not None, error
                assert int(found[1]) > 1, f"{key} = {value!r}: {error}"
                if value in ("x", -1) and key not in ("quantization_config", "rope_scaling"):
                    line = text.splitlines()[int(found[1]) - 1]
                    assert line.startswith(f' "{key}":'), f"{key} = {value!r}: {error}"


@pytest.mark.parametrize("kind", REFUSED.split())
def test_other_families_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"vocab_size": 9, "model_type": kind}, indent=0))
    with pytest.raises(ModelError, match=rf'config\.json:3: model_type "{kind}" is not supported'):
        load_workload(path, BATCH)


def test_the_part_of_a_model_of_images_is_named(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"model_type": "kimi_k25", "text_config": {"model_type": "kimi_k2"}})
    )
    with pytest.raises(ModelError, match='its text_config is a "kimi_k2"'):
        load_workload(path, BATCH)
