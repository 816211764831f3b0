"""Generated plans with Transformer Engine's layers, each equal to one process with the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import islice

import pytest

from tests.runtime.plan_features import TRANSFORMER_ENGINE_SPACE
from tests.runtime.plan_generator import cases
from tests.runtime.transformer_engine.proofs import SEED, prove_some, tried
from tests.runtime.transformer_engine.with_layers import TRANSFORMER_ENGINE, call

NUM_CASES, NUM_DEFAULT, AT_A_TIME = 60, 3, 6


@pytest.mark.parametrize(
    "first, last",
    [(0, NUM_DEFAULT)]
    + [
        pytest.param(first, min(first + AT_A_TIME, NUM_CASES), marks=pytest.mark.slow)
        for first in range(NUM_DEFAULT, NUM_CASES, AT_A_TIME)
    ],
)
def test_generated_plans_train_as_one_process(first: int, last: int) -> None:
    found = call(TRANSFORMER_ENGINE, prove_some, first, last)
    assert len(found) == last - first
    unlike = [text for is_equal, text, _ in found if not is_equal]
    assert not unlike, "\n".join(unlike)
    assert all(said.startswith("> layers: Transformer Engine 2.20.2") for *_, said in found)


def test_the_cases_contain_every_pair_that_is_possible() -> None:
    space = TRANSFORMER_ENGINE_SPACE
    drawn = list(islice(cases(SEED, space), NUM_CASES))
    covered = {pair for case in drawn for pair in space.pairs_of(case.values)}
    assert space.allowed_pairs() - covered == set()
    stages = [s for case in drawn for r in case.plan.layout.replicas for s in r.stages]
    assert any(s.context_parallel > 1 for s in stages)
    assert all(s.context_shares is None for s in stages)


@pytest.mark.slow
def test_verify_says_which_layers_ran() -> None:
    """By default Transformer Engine's; local ones where the job names them."""
    layout = "tp2:1,tp1:1 @2 | tp1:2 @1"
    for flags, expected in (
        ((), "Transformer Engine 2.20.2's own, its kernels in plain torch"),
        (("--transformer-impl=local",), "Megatron's local ones (the job names them)"),
    ):
        words = [sys.executable, "-m", "megatron_hetero", "verify", "--json", "--steps=2"]
        done = subprocess.run(
            [*words, "--optimizer=adam", "--layout", layout, "--", *flags],
            capture_output=True,
            text=True,
            timeout=300,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert json.loads(done.stdout)["layers"] == expected
        assert f"layers        {expected}" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, said",
    [
        (
            ["--num-experts=4", "--moe-grouped-gemm", "--sequence-parallel"],
            "Bias in Moe is only supported when ETP==1",
        ),
        (
            [
                *("--num-experts=4", "--moe-grouped-gemm", "--sequence-parallel"),
                "--disable-bias-linear",
            ],
            "equal",
        ),
        (["--attention-backend=unfused"], "equal"),
        (["--attention-backend=fused", "--window-size", "8,0"], "equal"),
        (["--bf16", "--swiglu", "--normalization=RMSNorm"], "equal"),
        (
            ["--recompute-granularity=selective", "--recompute-modules", "mlp", "core_attn"],
            "UnsupportedError: .*--recompute-modules mlp with biases",
        ),
    ],
)
def test_further_jobs(flags: list[str], said: str) -> None:
    import re

    assert re.search(said, call(TRANSFORMER_ENGINE, tried, flags), re.DOTALL)
