"""`--fp8-format` on an asymmetric plan: what is refused, and by which name."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hetero.errors import EnvironmentMismatchError, UnsupportedError
from megatron_hetero.plan.plan import Host, Plan
from megatron_hetero.runtime.batches import with_micro_batch_sizes
from megatron_hetero.runtime.model import fp8
from tests.runtime.test_refusals import LAYOUT, MODEL, refuse
from tests.runtime.workloads import plan, workload

ACCEPTED = {
    "transformer_impl": "transformer_engine",
    "fp8_recipe": "tensorwise",
    "fp8_param_gather": False,
    "first_last_layers_bf16": False,
    "num_experts": None,
    "bf16": True,
}


@pytest.fixture(autouse=True)
def _world_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")


def broken(**changes: Any) -> list[str]:
    args = SimpleNamespace(**{**ACCEPTED, **changes})
    return [flag for flag, asks, _ in fp8.REFUSED if asks(args)]


def test_without_a_gpu_it_is_refused_before_the_start() -> None:
    flags = ["--fp8-format=hybrid", "--fp8-recipe=tensorwise", "--bf16"]
    message = refuse([*MODEL, f"--hetero-layout={LAYOUT}", *flags], UnsupportedError)
    assert "--fp8-format" in message and "without a GPU" in message
    assert "--fp8-recipe" not in message


def test_local_layers_are_refused_with_what_to_install() -> None:
    local = SimpleNamespace(**{**ACCEPTED, "transformer_impl": "local"})
    advice = [way for _, asks, way in fp8.REFUSED if asks(local)]
    assert any("install Transformer Engine" in way for way in advice)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"fp8_recipe": "delayed"}, "--fp8-recipe"),
        ({"fp8_param_gather": True}, "--fp8-param-gather"),
        ({"first_last_layers_bf16": True}, "--first-last-layers-bf16"),
        ({"num_experts": 4}, "--num-experts"),
        ({"bf16": False}, "--fp16"),
    ],
)
def test_what_it_does_not_go_with_is_named(changes: dict[str, Any], flag: str) -> None:
    assert broken() == []
    assert broken(**changes) == [flag]


def on(layout: str, *gpus: str) -> Plan:
    """A plan whose rank i is on a node of its own with GPU type i."""
    asked = with_micro_batch_sizes(plan(layout), 1)
    nodes = iter(f"n{i}:0" for i in range(len(gpus)))
    replicas = tuple(
        replace(
            r,
            stages=tuple(
                replace(s, devices=tuple(next(nodes) for _ in range(s.shape.num_devices)))
                for s in r.stages
            ),
        )
        for r in asked.replicas
    )
    hosts = tuple(Host(f"n{i}", f"host{i}", gpu, (0,)) for i, gpu in enumerate(gpus))
    return replace(asked, replicas=replicas, hosts=hosts)


def test_a_gpu_that_cannot_is_named_with_its_stage() -> None:
    asked = on("tp1:3,tp1:1 @4", "H100-80GB", "A100-80GB")
    with pytest.raises(EnvironmentMismatchError, match=r"stage 1: A100-80GB \(.* 8\.0\)") as caught:
        fp8.check_plan(asked, workload())
    assert "stage 0" not in str(caught.value)
    fp8.check_plan(on("tp1:3,tp1:1 @4", "H100-80GB", "RTX-4090"), workload())


def test_sizes_without_an_fp8_product_are_named() -> None:
    with pytest.raises(UnsupportedError, match=r"tensor rank 0 has .* columns of"):
        fp8.check_plan(
            with_micro_batch_sizes(plan("tp4(2:1:1:1):4 @4"), 1), workload(ffn_hidden_size=72)
        )
    with pytest.raises(
        UnsupportedError, match=r"tensor rank 3 has 40 hidden channels, no multiple"
    ):
        fp8.check_plan(with_micro_batch_sizes(plan("tp4:4 @4"), 1), workload(hidden_size=40))
    with pytest.raises(UnsupportedError, match="tokens of a micro-batch"):
        fp8.check_plan(with_micro_batch_sizes(plan("tp1cp2:4 @4"), 1), workload(seq_length=20))
