"""What `serve` and `route` refuse before anything starts, and which GPUs `serve` takes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from megatron_hetero.cli import serve
from megatron_hetero.cli.main import main
from megatron_hetero.serving.fleet.file import load_serving_plan
from tests.serving.route.plans import two_replicas


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layout", "tp1:4", "--port", "0"], "--port 0"),
        (["--layout", "tp1:4", "--answer-limit", "0.3"], "1 to 86400 seconds"),
        (["--layout", "tp1:4", "--replica", "a"], "goes with --plan"),
        (["--plan", "serve.json"], "name one of a, b"),
        (["--plan", "serve.json", "--replica", "a"], "lies on m, n"),
    ],
)
def test_serve_refuses(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_replicas(tmp_path / "serve.json")
    monkeypatch.chdir(tmp_path)
    assert main(["serve", "--model", "model", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_brings_its_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "config.json").write_text("{}")
    words = ["serve", "--model", str(tmp_path), "--layout", "tp1:4"]
    assert main(words) == 2
    assert "has no tokenizer" in capsys.readouterr().err
    given = argparse.Namespace(model=tmp_path, megatron_args=["--tokenizer-type=NullTokenizer"])
    assert serve._tokenizer_of(given) == ()
    (tmp_path / "tokenizer.json").write_text("{}")
    given.megatron_args = []
    assert f"--tokenizer-model={tmp_path}" in serve._tokenizer_of(given)


def test_a_folder_says_which_tokens_end_an_answer(tmp_path: Path) -> None:
    assert serve._ends_of(tmp_path) == ""
    (tmp_path / "config.json").write_text('{"eos_token_id": 2}')
    assert serve._ends_of(tmp_path) == "2"
    # As of Llama 3: an end of text, of a message and of a turn.
    file = tmp_path / "generation_config.json"
    file.write_text('{"eos_token_id": [128001, 128008, 128009]}')
    assert serve._ends_of(tmp_path) == "128001,128008,128009"
    file.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(serve.FileFormatError, match="eos_token_id is </s>"):
        serve._ends_of(tmp_path)


@pytest.mark.parametrize(("count", "seen"), [(4, "2"), (2, None)])
def test_a_plans_replica_takes_the_plans_gpus(
    count: int, seen: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = load_serving_plan(two_replicas(tmp_path / "serve.json")).replicas[1]
    monkeypatch.setattr(serve.shutil, "which", lambda name: name)
    monkeypatch.setattr(serve, "find_gpus", lambda: ("a card",) * count)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    if seen is None:
        with pytest.raises(serve.EnvironmentMismatchError, match="GPU 2 of m"):
            serve._take_gpus(whole)
        return
    serve._take_gpus(whole)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_route_refuses_a_replica_with_two_addresses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = two_replicas(tmp_path / "serve.json")
    words = ["--replica", "a=http://127.0.0.1:1", "--replica", "a=http://127.0.0.1:2"]
    assert main(["route", str(plan), *words]) == 2
    assert "has the address http://127.0.0.1:1 already" in capsys.readouterr().err
