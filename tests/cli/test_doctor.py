"""`doctor`: exit codes, text and JSON."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/rtx3080-rtx4090"
SOUND = [
    "--env=NCCL_ALGO=Ring", "--env=NCCL_PROTO=Simple", "--env=fast:NCCL_P2P_DISABLE=1"
]  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    cluster = str(EXAMPLE / "cluster.yaml")
    model = str(EXAMPLE / "gpt-1.3b.sh")
    words = ["plan", "--cluster", cluster, "--model", model, "--strategy", "symmetric"]
    assert main([*words, "-o", str(path)]) == 0
    return ["doctor", str(path), "--cluster", cluster, "--no-megatron"]


def test_warnings_are_shown_and_end_well(
    plan: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*plan, "--env=fast:NCCL_P2P_DISABLE=0"]) == 0
    out = capsys.readouterr().out
    assert "NCCL_P2P_DISABLE=1 on fast" in out
    assert "1 warning. Looked at 4 GPUs on 2 machines" in out


def test_a_sound_job_has_nothing(plan: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*plan, *SOUND]) == 0
    assert main(plan) == 0  # the launch lines set all of it by themselves
    assert capsys.readouterr().out.startswith("Nothing found.")


def test_errors_end_with_one(plan: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*plan, *SOUND, "--env=slow:NCCL_NET=Socket", "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert not data["ok"]
    assert [finding["id"] for finding in data["findings"]] == ["fabric-differs"]
    assert set(data["findings"][0]) == {"id", "severity", "where", "what", "remedy"}


def test_megatron_itself_is_asked_about_the_flags(
    plan: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*plan, *SOUND, "--json", "--", "--fp8-param-gather"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["megatron"]["because"] == "--no-megatron"
    words.remove("--no-megatron")
    assert main(words) == 1
    data = json.loads(capsys.readouterr().out)
    assert [finding["id"] for finding in data["findings"]] == ["megatron-refuses"]
    assert data["findings"][0]["where"] == "--fp8-param-gather"
    assert data["megatron"] == {"release": version("megatron-core"), "because": None}


def test_settings_are_the_nodes_own_on_the_cluster(plan: list[str]) -> None:
    assert main([*plan, *SOUND, "--on-cluster"]) == 2


def test_on_the_cluster_it_wants_all_its_processes(
    plan: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    assert main([*plan, "--on-cluster"]) == 5
    assert "the plan has 4 devices" in capsys.readouterr().err
