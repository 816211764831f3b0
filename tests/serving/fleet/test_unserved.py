"""What is said of a class that no replica serves: its length, or the deadline that is too tight."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.errors import InfeasiblePlanError
from megatron_hetero.serving.fleet.offers import make_fleet
from megatron_hetero.serving.fleet.unserved import (
    beyond_positions,
    not_stored,
    refuse_unserved,
    unread_limits,
)
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.served import load_served
from megatron_hetero.serving.workload.load import load_request_mix
from megatron_hetero.serving.workload.requests import TokenLengths

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving"
CLUSTER = load_cluster(EXAMPLE / "cluster.yaml")
SERVED = load_served(EXAMPLE, "16-bit", "16-bit")
MIX = load_request_mix(EXAMPLE / "workload.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_tokens": TokenLengths(((30_000_000, 1.0),))}, "30,000,253 tokens, and the"),
        ({"first_token_s": 1e-6}, r"first_token is 1 us, and .* alone takes \d+"),
        ({"between_tokens_s": 1e-6}, r"between_tokens is 1 us, and .* alone takes \d"),
    ],
)
def test_it_says_which_of_length_and_deadlines_is_too_much(
    changes: dict[str, Any], message: str
) -> None:
    chat, documents = MIX.classes
    mix = replace(MIX, classes=(documents, replace(chat, **changes)))
    fleet = make_fleet(CLUSTER, SERVED, ENGINES["vllm"], mix)
    with pytest.raises(InfeasiblePlanError, match=f'class "chat": .*{message}'):
        refuse_unserved(fleet)


def test_requests_beyond_the_context_of_the_model_are_named(tmp_path: Path) -> None:
    chat, documents = MIX.classes
    chat = replace(chat, input_tokens=TokenLengths(((9000, 1.0),)))
    long = replace(MIX, classes=(chat, documents))
    assert not list(beyond_positions(SERVED, MIX))
    (note,) = beyond_positions(SERVED, long)
    assert 'class "chat": its longest request has 9,253 tokens, and the model 8,192 pos' in note
    # Positions that are stretched reach further than the number of the config.
    config = json.loads((EXAMPLE / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not list(beyond_positions(load_served(tmp_path, "16-bit", "16-bit"), long))


def test_limits_that_a_fleet_does_not_keep_to_are_named() -> None:
    assert not list(unread_limits(CLUSTER.limits))
    apart = ("a", "nodes")
    limits = Limits(num_replicas=2, no_tensor_parallel_across=apart)
    (note,) = unread_limits(limits)
    assert note.endswith(": num_replicas, no_tensor_parallel_across")


def test_a_class_without_deadlines_is_served() -> None:
    classes = tuple(replace(c, first_token_s=inf, between_tokens_s=inf) for c in MIX.classes)
    mix = replace(MIX, classes=classes)
    refuse_unserved(make_fleet(CLUSTER, SERVED, ENGINES["vllm"], mix))


def test_int4_of_a_checkpoint_without_it_is_noted(tmp_path: Path) -> None:
    config = json.loads((EXAMPLE / "config.json").read_text())
    assert "16-bit weights" in next(not_stored(load_served(EXAMPLE, "int4", "16-bit")))
    # vLLM and SGLang make fp8 of 16 bits themselves.
    assert not list(not_stored(load_served(EXAMPLE, "fp8", "16-bit")))
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert not list(not_stored(load_served(tmp_path, None, "16-bit")))
