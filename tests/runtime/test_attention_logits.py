"""`--qk-clip`, `--log-max-attention-logit`: the largest logits, and clipped heads, of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.utils import unwrap_model
from megatron.training import arguments, training

from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.guarded import standing_for
from tests.runtime.flag_runs import LAYOUT, Log, one_process_job, plan_job, read_log

UNEVEN = "tp2(1:3):3,tp1:1 @4 | tp1:4 @2"
GROUPS = ("--group-query-attention", "--num-query-groups=4", "--num-attention-heads=8")
LATENT = (
    "--multi-latent-attention", "--q-lora-rank=16", "--kv-lora-rank=16", "--qk-head-dim=8",
    "--qk-pos-emb-head-dim=4", "--v-head-dim=8", "--rope-type=rope", "--normalization=RMSNorm",
)  # fmt: skip
SHARP = ("--init-method-std=0.5", "--train-iters=4", "--optimizer=sgd")
CLIP = ("--qk-clip", "--qk-clip-threshold=0.5", "--qk-clip-alpha=0.3")
LOG = ("--log-max-attention-logit",)


def _reporting(job: LocalJob) -> LocalJob:
    """The job where Transformer Engine is new enough, and the largest logit is printed."""

    def train(rank: int) -> None:
        is_new = arguments.is_te_min_version
        arguments.is_te_min_version = lambda version, *a: version == "2.9.0" or is_new(version, *a)
        training.clip_qk = standing_for(training.clip_qk, partial(_two_down, training.clip_qk))
        step = training.train_step

        def shown(*given: Any, **named: Any) -> Any:
            result = step(*given, **named)
            print(f"largest logit: {float(result[-1])!r} of a step", flush=True)
            return result

        training.train_step = shown
        job.function(rank)

    return replace(job, function=train)


def _two_down(clip_qk: Callable[..., float], model: list[Any], **named: Any) -> float:
    """Megatron looks for the layers two wrappers down, of which fp32 has one."""
    wrapped = [SimpleNamespace(module=SimpleNamespace(module=c)) for c in unwrap_model(model)]
    return clip_qk(wrapped, **named)


def largest(log: Log) -> list[float]:
    return log.numbers(r"largest logit: (\S+) of")


def runs(folder: Path, flags: Sequence[str], layout: str) -> tuple[Log, Log]:
    folder.mkdir(parents=True)
    jobs = [
        _reporting(make(folder / name, flags, layout))
        for name, make in (("plan", plan_job), ("one", one_process_job))
    ]
    run_jobs(jobs, 120)
    return read_log(jobs[0]), read_log(jobs[1])


@pytest.mark.parametrize(
    ("layout", "model"),
    [
        (UNEVEN, GROUPS),
        pytest.param(LAYOUT, LATENT, marks=pytest.mark.slow),
        pytest.param(LAYOUT, (*GROUPS, "--bf16"), marks=pytest.mark.slow),
    ],
    ids=["unlike heads", "latent", "bf16"],
)
def test_heads_are_clipped_by_the_largest_logit_of_the_job(
    layout: str, model: tuple[str, ...], tmp_path: Path
) -> None:
    ours, one = runs(tmp_path / "clipped", (*model, *SHARP, *CLIP), layout)
    _, plain = runs(tmp_path / "not", (*model, *SHARP, *LOG), layout)
    rel = 2e-2 if "--bf16" in model else 1e-5
    assert len(one.losses) == 4
    assert ours.losses == pytest.approx(one.losses, rel=rel)
    assert largest(ours) == pytest.approx(largest(one), rel=rel)
    assert largest(plain)[-1] > 2 * largest(one)[-1] > 0
    assert one.losses[1:] != pytest.approx(plain.losses[1:], rel=rel)


@pytest.mark.slow
def test_the_largest_logit_of_the_log_is_the_whole_models(tmp_path: Path) -> None:
    ours, one = runs(tmp_path / "logged", (*SHARP, *LOG), LAYOUT)
    assert len(set(largest(one))) == 4
    assert largest(ours) == pytest.approx(largest(one), rel=1e-5)
    assert ours.losses == pytest.approx(one.losses, rel=3e-6)
