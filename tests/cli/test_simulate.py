"""`simulate`: a step's figures for people and programs, and a trace that a viewer opens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = str(ROOT / "examples/rtx3080-rtx4090/cluster.yaml")
MODEL = str(ROOT / "examples/rtx3080-rtx4090/gpt-1.3b.sh")


def simulate(layout: str, *more: str) -> int:
    words = ["simulate", "--layout", layout, "--cluster", CLUSTER, "--model", MODEL, *more]
    return main([*words, "--global-batch-size=8"])


def test_the_figures_of_a_step(capsys) -> None:
    assert simulate("tp2:5,tp1:12,tp1:7 @8", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["sends"] == "buffered"
    assert 0 < data["bubble"] < 1
    assert set(data["peak_memory_bytes"]) == {"slow:0", "slow:1", "fast:0", "fast:1"}
    for stage in data["stages"]:
        assert stage["operations"][-1]["kind"] == "step"
        assert stage["operations"][-1]["end_s"] <= data["step_time_s"]
        assert stage["busy_s"] < data["step_time_s"]
    assert len(data["messages"]) == 2 * 2 * 8
    names = {link["name"] for link in data["links"]}
    assert {"slow -> fast", "fast -> slow", "fast:0 out", "fast:1 in"} <= names


def test_stock_plans_can_be_simulated_under_another_trainer(capsys) -> None:
    found = {}
    for sends in ("as-run", "buffered"):
        assert simulate("tp1:4,tp1:5,tp1:8,tp1:7 @8", "--json", "--sends", sends) == 0
        found[sends] = json.loads(capsys.readouterr().out)
    assert [found[sends]["sends"] for sends in found] == ["waited", "buffered"]
    assert found["buffered"]["step_time_s"] < found["as-run"]["step_time_s"]


def test_the_words_say_who_runs_the_plan(capsys) -> None:
    assert simulate("tp1:4,tp1:5,tp1:8,tp1:7 @8") == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "stock Megatron runs this plan" in words
    assert "step time" in words
    assert "slow -> fast" in words


def test_the_trace_is_a_timeline(tmp_path: Path, capsys) -> None:
    path = tmp_path / "trace.json"
    assert simulate("tp1:4,tp1:5,tp1:8,tp1:7 @8", "--trace", str(path)) == 0
    events = json.loads(path.read_text())["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert sum(e["cat"] == "forward" for e in slices) == 4 * 8
    assert sum(e["cat"] == "message" for e in slices) == 2 * 3 * 8
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert "replica 0 stage 3: fast:1" in names.values()
    for thread in {(e["pid"], e["tid"]) for e in slices}:
        assert thread in names
        mine = sorted((e["ts"], e["dur"]) for e in slices if (e["pid"], e["tid"]) == thread)
        for (start, length), (after, _) in pairwise(mine):
            assert start + length <= after + 1e-3, "slices of a thread must not overlap"
    assert any(e["ph"] == "C" for e in events)


def test_a_plan_without_devices_takes_a_cluster_that_fits(
    layout_plan: Callable[..., Path], capsys
) -> None:
    assert simulate("tp1:12,tp1:12 @8") == 4
    assert "takes 2 GPUs" in capsys.readouterr().err
    assert simulate("tp1:6,tp2:12,tp1:6 @8") == 4
    assert "slow:1 (RTX-3080), fast:0 (RTX-4090), which are not equal" in capsys.readouterr().err
    path = layout_plan("tp1:2,tp1:2 @4")
    assert main(["simulate", str(path), "--cluster", CLUSTER]) == 2
    assert "does not say which model" in capsys.readouterr().err


def test_model_flags_do_not_go_with_a_plan_file(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "--cluster", CLUSTER, "--model", MODEL, "-o", str(path)]) == 0
    assert main(["simulate", str(path), "--cluster", CLUSTER]) == 0
    assert main(["simulate", str(path), "--cluster", CLUSTER, "--seq-length", "64"]) == 2
    assert "go with --layout" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["simulate"])
def test_the_cluster_is_asked_for(verb: str, capsys) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([verb, "plan.json"])
    assert leaving.value.code == 2
    assert "--cluster" in capsys.readouterr().err


def test_a_layout_that_does_not_fit_is_said(capsys) -> None:
    layout, more = "tp1:1,tp1:1,tp1:1,tp1:77 @8", ("--num-layers", "80")
    assert simulate(layout, *more) == 0
    words = " ".join(capsys.readouterr().out.split())
    found = re.search(r"DOES NOT FIT: stage 3 of replica 0 lacks ([0-9.]+) GiB", words)
    assert found is not None and words.count("DOES NOT FIT") == 1
    assert simulate(layout, "--json", *more) == 0
    data = json.loads(capsys.readouterr().out)
    assert not data["fits"]
    last = data["stages"][-1]
    assert last["lacking_bytes"] == last["peak_memory_bytes"] - last["capacity_bytes"]
    assert last["lacking_bytes"] / 2**30 == pytest.approx(float(found[1]), rel=1e-2)
    assert simulate("tp1:4,tp1:5,tp1:8,tp1:7 @8", "--json") == 0
    assert json.loads(capsys.readouterr().out)["fits"]
