"""Every family's tensors are a rearrangement of Megatron's: each number once, there and back."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from megatron_hetero.cli.ckpt import DESCRIPTION
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.lab.huggingface.families import Heads, pieces_of
from megatron_hetero.model.huggingface.weight_families import CONDITIONS, families_in_words

SHAPE = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, **SHAPE},
    "mistral": {"num_key_value_heads": 1, **SHAPE},
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 4, **SHAPE},
    "qwen3": {"head_dim": 6, "num_key_value_heads": 2, **SHAPE},
    "gpt2": {"n_layer": 2, "n_embd": 8, "n_head": 2},
    "gpt_neox": {"use_parallel_residual": False, **SHAPE},
    "mixtral": {"num_key_value_heads": 4, "num_local_experts": 3, **SHAPE},
    "qwen3_moe": {"num_experts": 2, "head_dim": 6, **SHAPE},
    "opt": {"activation_function": "gelu", **SHAPE},
}


def test_the_list_and_the_help_name_every_family_that_converts() -> None:
    assert set(CONDITIONS) == set(CONFIGS)
    shown = " ".join(DESCRIPTION.split())
    assert families_in_words() in shown and "mixtral, " in shown and "qwen3_moe, " in shown


def test_heads_stand_group_by_group() -> None:
    heads = Heads(query=4, groups=2, channels=1)
    q, k, v = torch.arange(4), torch.tensor([10, 11]), torch.tensor([20, 21])
    assert heads.join(q, k, v).tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back(kind: str) -> None:
    config = {"model_type": kind, **CONFIGS[kind]}
    seen: set[str] = set()
    for piece in pieces_of(config):
        rows = 24
        if "linear_qkv" in piece.megatron:
            count, channels = (
                (config["n_head"], 4) if kind == "gpt2" else (4, config.get("head_dim") or 2)
            )
            groups = config.get("num_key_value_heads") or count
            rows = (count + 2 * groups) * channels
        whole = torch.randn(rows, 3) if piece.megatron.endswith("weight") else torch.randn(rows)
        parts = piece.split(whole)
        assert len(parts) == len(piece.names)
        assert torch.equal(piece.join(*parts), whole)
        assert not seen & set(piece.names)
        seen |= set(piece.names)
    assert len({piece.megatron for piece in pieces_of(config)}) == len(pieces_of(config))


@pytest.mark.parametrize(("kind", "rows"), [("mistral", [64, 16, 16]), ("qwen3", [4096] * 3)])
def test_heads_that_the_file_leaves_out_are_those_of_its_class(kind: str, rows: list[int]) -> None:
    config = {"model_type": kind, **SHAPE, "hidden_size": 64, "num_attention_heads": 32}
    qkv = next(piece for piece in pieces_of(config) if "linear_qkv.weight" in piece.megatron)
    parts = qkv.split(torch.zeros(sum(rows), 64))
    assert [len(part) for part in parts] == rows


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "gpt_neox", **SHAPE}, "parallel_residual"),
        ({"model_type": "opt", **SHAPE}, "activation 'relu'"),
        ({"model_type": "bert"}, "can be converted"),
    ],
)
def test_weights_that_would_compute_something_else_are_refused(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(UnsupportedError, match=words):
        pieces_of(config)


def test_the_help_needs_no_torch() -> None:
    program = "import sys, megatron_hetero.cli.ckpt; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
