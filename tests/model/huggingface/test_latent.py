"""`config.json` of models with latent attention: DeepSeek-V3, DeepSeek-V2-Lite, Kimi K2's keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import HeteroError, ModelError, UnsupportedError
from megatron_hetero.model.blocks import num_parameters
from megatron_hetero.model.load import load_workload
from megatron_hetero.model.spec import Workload

BATCH = ["--seq-length", "4096", "--global-batch-size", "64", "--micro-batch-size", "1"]
YARN = {
    "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
    "beta_slow": 1, "original_max_position_embeddings": 4096,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_shared_experts": 1,
    "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512,
    "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
    "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "max_position_embeddings": 163840, "rms_norm_eps": 1e-06,
    "rope_theta": 10000, "rope_scaling": YARN, "tie_word_embeddings": False,
    "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
V2_LITE: dict[str, Any] = {
    "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "n_shared_experts": 2, "n_routed_experts": 64,
    "routed_scaling_factor": 1.0, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "num_experts_per_tok": 6, "moe_layer_freq": 1,
    "first_k_dense_replace": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    "max_position_embeddings": 163840, "rope_theta": 10000, "rope_scaling": YARN,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


def load(folder: Path, config: dict[str, Any]) -> Workload:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return load_workload(path, [*BATCH, "--make-vocab-size-divisible-by", "1"])


@pytest.mark.parametrize(
    ("config", "params"),
    # The parameters of the published models without those that predict further tokens.
    [(DEEPSEEK_V3, 671_026_404_352), (V2_LITE, 15_706_484_224)],
    ids=["V3", "V2-Lite"],
)
def test_the_published_sizes(config: dict[str, Any], params: int, tmp_path: Path) -> None:
    assert num_parameters(load(tmp_path, config)) == params


def test_what_the_router_does(tmp_path: Path) -> None:
    job = load(tmp_path, DEEPSEEK_V3)
    words = " ".join(job.megatron_args)
    for flags in (
        "--moe-router-score-function sigmoid", "--moe-router-enable-expert-bias",
        "--moe-router-num-groups 8 --moe-router-group-topk 4",
        "--moe-router-topk-scaling-factor 2.5", "--moe-layer-freq [0]*3+[1]*58",
        "--rope-type yarn --rotary-scaling-factor 40 --mscale 1.0 --mscale-all-dim 1.0",
    ):  # fmt: skip
        assert flags in words
    assert "--moe-router-pre-softmax" not in words
    assert "1 layers that predict further tokens are left out" in job.source
    lite = " ".join(load(tmp_path, V2_LITE).megatron_args)
    assert "--moe-router-pre-softmax" in lite and "--q-lora-rank" not in lite
    assert "--moe-router-num-groups" not in lite


def test_experts_in_some_layers_of_qwen(tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "max_position_embeddings": 4096, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "decoder_sparse_step": 2, "mlp_only_layers": [5],
    }  # fmt: skip
    assert load(tmp_path, config).model.moe_layer_freq == (0, 1, 0, 1, 0, 0)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"scoring_func": "tanh"}, UnsupportedError, "scoring_func is 'tanh'"),
        ({"rope_scaling": {"type": "linear"}}, UnsupportedError, "rope_scaling is 'linear'"),
        ({"rope_theta": 10000.5}, UnsupportedError, "is not a whole number"),
        ({"attention_bias": True}, UnsupportedError, "attention_bias is True"),
        ({"kv_lora_rank": 0}, ModelError, "kv_lora_rank: input should be greater"),
    ],
)
def test_refusals(
    changes: dict[str, Any], error: type[HeteroError], words: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=words):
        load(tmp_path, DEEPSEEK_V3 | changes)
