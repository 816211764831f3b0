"""The job of a command line: stock Megatron's or ours, and what its flags do not go with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_hetero.errors import EnvironmentMismatchError, UnsupportedError, UsageError
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.asymmetric import AsymmetricJob
from megatron_hetero.runtime.job.steps import TrainingJob, job_of
from megatron_hetero.runtime.job.stock import StockJob
from tests.runtime.test_refusals import MODEL

ASYMMETRIC = "--hetero-layout=tp2:3,tp1:1 @4 | tp1:4 @2"
EQUAL = "--hetero-layout=tp2:4 @3 | tp2:4 @3"
"""Which stock Megatron runs."""


@pytest.fixture(autouse=True)
def _cpu_rank_of_four(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(backend, "cuda_is_usable", lambda: False)
    yield
    backend.deactivate_cpu_backend()


def job(*flags: str, in_our_runtime: bool = False) -> TrainingJob:
    return job_of([*MODEL, *flags], in_our_runtime=in_our_runtime)


def test_a_plan_has_the_simplest_job_that_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(job(), StockJob)
    assert isinstance(job(ASYMMETRIC), AsymmetricJob)
    assert "stock Megatron's own" not in capsys.readouterr().out
    assert isinstance(job(EQUAL), StockJob)
    said = capsys.readouterr().out
    assert "> this plan is stock Megatron's own: " in said
    assert "--tensor-model-parallel-size" in said
    assert isinstance(job(EQUAL, in_our_runtime=True), AsymmetricJob)
    assert isinstance(job(EQUAL, "--hetero-on-loss=replan"), AsymmetricJob)


def test_the_first_rank_says_what_a_cpu_changes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--transformer-impl=local", "--transformer-impl", "transformer_engine"]
    job(ASYMMETRIC, *flags)
    first, second = capsys.readouterr().out.splitlines()
    assert first == (
        "> layers: Megatron's local ones (no Transformer Engine on this CPU: Megatron was imported "
        "without it in this process)"
    )
    assert second == "> no GPU: --transformer-impl transformer_engine becomes local"
    job(ASYMMETRIC, *flags[:1])  # as it is on a CPU anyway
    line = "> layers: Megatron's local ones (the job names them)\n"
    assert capsys.readouterr().out == line
    monkeypatch.setenv("RANK", "3")
    job(ASYMMETRIC, *flags)
    assert capsys.readouterr().out == ""


def test_what_a_job_lacks_is_said_before_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--hetero-timeline needs a plan"):
        job("--hetero-timeline=t.json")
    sequences = "--hetero-sequences=flexible", "--hetero-cluster=none.yaml"
    with pytest.raises(UnsupportedError, match="a script's own batches are of one length"):
        job_of([*MODEL, *sequences], of_a_script=True)
    for flag in ("--hetero-timeline=t.json", "--hetero-on-loss=replan"):
        with pytest.raises(UnsupportedError, match="does not go with --hetero-sequences"):
            job(*sequences, flag)
    monkeypatch.setenv("WORLD_SIZE", "5")
    with pytest.raises(EnvironmentMismatchError, match="the plan has 4 devices"):
        job(ASYMMETRIC)


def test_a_scripts_own_flags_are_for_its_parser() -> None:
    """What Megatron does not know is neither judged nor lost."""
    given = [*MODEL, ASYMMETRIC, "--flag-of-the-script", "7"]
    assert isinstance(job_of(given, of_a_script=True), AsymmetricJob)
