"""Every flag of `flag_effects` does on a plan what it does in one process, and does something."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.flags.support.lookup import support_of
from megatron_hetero.lab.verify.processes.floor import round_anew
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_effects import EFFECTS, YARN, Effect
from tests.runtime.flag_runs import Log, SameStart, one_process_job, plan_and_one, read_log

LOSS, NORM = 3e-6, 3e-3
"""The log prints seven digits of a loss and three of a norm's decimals."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("without")


@cache
def without(context: tuple[str, ...], folder: Path) -> Log:
    """One process that has the context of a flag and not the flag."""
    job = one_process_job(folder / str(abs(hash(context))), context)
    run_jobs([job], 120)
    return read_log(job)


def shows(effect: Effect, folder: Path, tmp_path: Path) -> None:
    ours, one = plan_and_one(tmp_path, [*effect.context, *effect.flags])
    assert len(ours.losses) >= 3
    assert ours.losses == pytest.approx(one.losses, rel=LOSS)
    assert ours.norms == pytest.approx(one.norms, rel=NORM)
    plain = without(effect.context, folder)
    differ = [
        a != pytest.approx(b, rel=rel)
        for a, b, rel in (
            (one.losses, plain.losses, 2 * LOSS), (one.norms, plain.norms, 2 * NORM),
        )
    ]  # fmt: skip
    assert any(differ), f"{effect.name} changes nothing in one process"


@pytest.mark.slow
@pytest.mark.parametrize("effect", EFFECTS, ids=lambda effect: effect.name)
def test_a_flag_does_what_it_does_in_one_process(
    effect: Effect, folder: Path, tmp_path: Path
) -> None:
    shows(effect, folder, tmp_path)


class _AnUlpApart(SameStart):
    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        for chunk in super().post_wrap_hook(model):
            round_anew(chunk)
        return model


@pytest.mark.slow
def test_rounding_is_far_below_the_bound(tmp_path: Path) -> None:
    """One process whose weights start a unit in the last place apart, under flags of which Adam
    makes 4e-5 with Megatron's own epsilon."""
    flags = (*YARN, "--yarn-beta-fast=8")
    one = one_process_job(tmp_path / "one", flags)
    apart = one_process_job(tmp_path / "apart", flags, start=_AnUlpApart())
    run_jobs([one, apart], 120)
    assert len(read_log(one).losses) == 3
    assert read_log(apart).losses == pytest.approx(read_log(one).losses, rel=LOSS / 3)


def test_many_flags_together(folder: Path, tmp_path: Path) -> None:
    """A quick look at a few that go together; the slow test has each alone."""
    model = (
        "--glu-linear-offset=1.0", "--norm-epsilon=0.1", "--rotary-percent=0.5",
        "--mtp-num-layers=1",
    )  # fmt: skip
    optimizer = ("--adam-beta1=0.5", "--decoupled-lr=0.1", "--lr-warmup-iters=2")
    context = ("--swiglu", "--position-embedding-type=rope")
    shows(Effect((*model, *optimizer), context), folder, tmp_path)


def test_what_is_shown_is_proved_in_the_table() -> None:
    table = flag_table().by_name
    for effect in EFFECTS:
        for token in effect.flags:
            if token.startswith("--"):
                assert support_of(table[token.partition("=")[0]]).status == "proved", token
