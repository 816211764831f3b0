"""`rehearse`: exit codes, JSON and both timelines; a lost GPU leads to another plan."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = str(ROOT / "examples/a100-rtx4090/cluster.yaml")
MODEL = str(ROOT / "examples/a100-rtx4090/gpt-7b.sh")


SIZES = ("--num-layers=10", "--global-batch-size=4")


def rehearse(*words: str, sizes: tuple[str, ...] = SIZES) -> int:
    return main(["rehearse", "--cluster", CLUSTER, "--model", MODEL, "--steps=1", *words, *sizes])


def test_a_lost_gpu_leads_to_another_plan_and_is_rehearsed(tmp_path: Path, capsys) -> None:
    """Four RTX 4090 are left of the five GPUs."""
    trace = tmp_path / "trace.json"
    layout = ["--layout", "tp1:6,tp2:2,tp2:2 @4", "--lose-device", "a100-0"]
    assert rehearse(*layout, "--json", "--trace", str(trace)) == 0
    captured = capsys.readouterr()
    data = json.loads(captured.out)
    assert data["ok"] is True
    assert data["lost_devices"] == ["a100-0"]
    assert abs(data["error"]) <= data["limit"]
    assert data["predicted_step_time_s"] == pytest.approx(
        data["rehearsed_step_time_s"], rel=data["limit"]
    )
    devices = {name for stage in data["stages"] for name in stage["devices"]}
    assert devices <= {"rtx-0:0", "rtx-0:1", "rtx-0:2", "rtx-0:3"}
    assert "without a100-0" in captured.err
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert lanes == {"predicted", "rehearsed"}


def test_link_terms_are_neither_predicted_nor_rehearsed(tmp_path: Path, capsys) -> None:
    cluster = tmp_path / "cluster.yaml"
    terms = "reduce_bandwidth: 1 GB/s, incast: {senders: 1, slowdown: 1}, bandwidth:"
    cluster.write_text(Path(CLUSTER).read_text().replace("bandwidth:", terms))
    layout = ["--layout", "tp1:2,tp2:1 @1 | tp2:3 @1", "--json"]
    sizes = (
        *("--num-layers=3", "--hidden-size=512", "--ffn-hidden-size=1024", "--vocab-size=1000"),
        *("--num-attention-heads=8", "--seq-length=512", "--global-batch-size=2"),
    )
    assert rehearse(*layout, "--cluster", str(cluster), sizes=sizes) == 0
    captured = capsys.readouterr()
    assert "without the reduce_bandwidth and incast" in captured.err
    predicted_s = json.loads(captured.out)["predicted_step_time_s"]
    steps_s = []
    for described in (CLUSTER, str(cluster)):
        assert main(["simulate", "--cluster", described, "--model", MODEL, *layout, *sizes]) == 0
        steps_s.append(json.loads(capsys.readouterr().out)["step_time_s"])
    assert predicted_s == steps_s[0] < steps_s[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slow-rank", "1"], "RANK:FACTOR"),
        (["--slow-link", "a:b"], "NODE:NODE:FACTOR"),
        (["--lose-device", "nobody:0"], "no such GPU or node"),
    ],
)
def test_faults_are_spelled(words: list[str], message: str, capsys) -> None:
    assert rehearse("--layout", "tp1:6,tp2:2,tp2:2 @4", *words) == 2
    assert message in capsys.readouterr().err


def test_places_that_take_no_file_are_refused_before_the_run(tmp_path: Path, capsys) -> None:
    """The trace came after the rehearsal, whose result was lost with it."""
    layout = ["--layout", "tp1:6,tp2:2,tp2:2 @4"]
    assert rehearse(*layout, "--trace", str(tmp_path / "none" / "trace.json")) == 4
    assert f"there is no folder {tmp_path / 'none'}" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert rehearse(*layout, "--keep", str(tmp_path / "file")) == 4
    assert "file: the folder cannot be made: File exists" in capsys.readouterr().err


def test_a_layout_without_the_memory_is_refused_before_ranks_start(capsys) -> None:
    """A rank refused it, in the name of a file that was gone."""
    assert rehearse("--layout", "tp1:6,tp2:2,tp2:2 @4", "--", "--hidden-size=16384") == 3
    assert "too much. Give its stage fewer layers" in capsys.readouterr().err
