"""`verify` from its command line to its data: the job's own objective, refusals and exit codes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import HeteroError, UnsupportedError, UsageError
from megatron_hetero.lab.verify.command import verify_arguments
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs

LATENT = (
    "--transformer-impl=local --multi-latent-attention --q-lora-rank=48 --kv-lora-rank=32 "
    "--qk-head-dim=16 --qk-pos-emb-head-dim=8 --v-head-dim=16 --normalization=RMSNorm "
    "--disable-bias-linear --swiglu --position-embedding-type=rope"
)


def asked(layout: str, *flags: str, **changes: Any) -> argparse.Namespace:
    fields: dict[str, Any] = {
        "plan": None,
        "layout": layout,
        "megatron_args": flags,
        "steps": 2,
        "optimizer": "sgd",
        "precision": None,
        "floor": False,
        "resume": False,
        "keep": None,
        "json": False,
        "plant": None,
    }
    return argparse.Namespace(**(fields | changes))


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        # Micro-batches of the plan's size, on a plan of stock Megatron: once a crash.
        ("tp1:2 @4x2", "--eod-mask-loss"),
        # The default sizes divide by every width: once refused.
        pytest.param(
            "tp3:1 @1 | tp1:1 @1",
            "--swiglu --softmax-type off-by-one --clip-grad 0.1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_it_once_refused_trains_as_one_process(layout: str, flags: str) -> None:
    data = verify_arguments(asked(layout, *flags.split()))
    assert data["ok"], data
    assert data["flags"]["left_out"] == []


def test_an_optimizer_that_stock_megatron_divides_is_seen_whole() -> None:
    """Each rank has a part of the sums, and new weights are under way when a step ends."""
    flags = "--use-distributed-optimizer --overlap-param-gather --overlap-grad-reduce"
    data = verify_arguments(asked("tp1:2 @1 | tp1:2 @1", *flags.split(), optimizer="adam"))
    assert data["ok"], data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("tp2:3,tp1:1 @4 | tp1:4 @2", "--transformer-impl=local"),
        ("tp2:3,tp1:1 @4 | tp1:4 @2", "--use-distributed-optimizer --bf16"),
    ],
)
def test_a_plan_that_stops_and_goes_on_is_compared_whole(layout: str, flags: str) -> None:
    data = verify_arguments(asked(layout, *flags.split(), optimizer="adam", resume=True, steps=5))
    assert data["ok"], data
    assert "saved, ended and resumed after step 2 (adam)" in data["shrunk"]


EXPERTS = "--num-experts=4 --moe-router-topk=2 --sequence-parallel --disable-bias-linear"


@pytest.mark.parametrize(
    ("flags", "changes", "word"),
    [
        ("", {}, "state of SGD"),
        ("", {"optimizer": "adam", "steps": 1}, "--steps 2"),
        (EXPERTS, {"optimizer": "adam", "precision": "bf16"}, "--precision fp32"),
    ],
)
def test_what_cannot_be_resumed_is_said(flags: str, changes: dict[str, Any], word: str) -> None:
    with pytest.raises(HeteroError, match=word):
        verify_arguments(asked("tp2:1,tp1:1 @2", *flags.split(), resume=True, **changes))


def test_choices_of_sinkhorn_are_compared_in_fp32_alone() -> None:
    flags = f"{EXPERTS} --moe-router-load-balancing-type sinkhorn --bf16"
    with pytest.raises(UnsupportedError, match="--precision fp32"):
        verify_arguments(asked("tp2:1,tp1:1 @2", *flags.split(), optimizer="adam"))


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ("--no-such-flag 2", UsageError),
        ("--hetero-sequences flexible", UnsupportedError),
        ("--hetero-init=megatron", UnsupportedError),
        ("--iterations-to-skip 2", UnsupportedError),
        # Stock Megatron itself, which makes the weights of all runs, would not end with it.
        ("--recompute-granularity=selective --recompute-modules mlp", UnsupportedError),
    ],
)
def test_refusals_come_before_anything_is_trained(flags: str, kind: type[HeteroError]) -> None:
    with pytest.raises(kind):
        verify_arguments(asked("tp2:1,tp1:1 @2", *flags.split()))


@pytest.mark.slow
def test_what_ranks_refuse_is_what_is_said() -> None:
    """Once what a rank recorded was saved first, which failed and hid the refusal."""
    flags = ("--num-experts", "4", "--disable-bias-linear")
    with pytest.raises(RankFailedError, match="--sequence-parallel") as error:
        verify_arguments(asked("tp2:1,tp1:1 @2", *flags))
    assert error.value.exit_code == 2


def _refuse(rank: int) -> None:
    raise UnsupportedError("not yet")


def _die(rank: int) -> None:
    os._exit(1)


@pytest.mark.parametrize(("function", "code"), [(_refuse, 2), (_die, 6)])
def test_a_refusal_keeps_its_code_and_a_death_has_its_own(
    function: Any, code: int, tmp_path: Path
) -> None:
    with pytest.raises(RankFailedError) as error:
        run_jobs([LocalJob("a job", 1, function, tmp_path)], 60)
    assert error.value.exit_code == code


@pytest.mark.slow
def test_a_table_of_positions_that_context_ranks_do_not_cut_is_refused() -> None:
    """Once a traceback of Megatron's, from the middle of building the model."""
    flags = LATENT.split()
    with pytest.raises(RankFailedError, match="YaRN's positions and cp3") as error:
        verify_arguments(asked("tp1cp3:2,tp1:2 @2", *flags))
    assert error.value.exit_code == 2
    assert verify_arguments(asked("tp1cp3:2,tp1:2 @2", *flags, "--rope-type=rope"))["ok"]
