"""`report`: what it writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/one-workstation"


def test_it_writes_a_page_and_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, page, svg = (tmp_path / name for name in ("plan.json", "plan.html", "svg"))
    cluster = ["--cluster", str(EXAMPLE / "cluster.yaml")]
    job = ["--model", str(EXAMPLE / "llama-1.5b.flags"), "--strategy", "symmetric"]
    assert main(["plan", *cluster, *job, "-o", str(plan)]) == 0
    capsys.readouterr()
    assert main(["report", str(plan), *cluster, "-o", str(page), "--svg", str(svg), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert {path.name for path in svg.iterdir()} >= {"map.svg", "timeline.svg", "memory.svg"}
    assert set(data["written"]) == {str(page), *(str(path) for path in svg.iterdir())}
    trace = tmp_path / "trace.json"
    quick = ["report", str(plan), *cluster, "--quick", "-o", str(page), "--json"]
    quick += ["--trace", str(trace)]
    assert main(quick) == 0
    fast = json.loads(capsys.readouterr().out)
    # A search finds plans for stock Megatron too that its own even grid has not.
    assert fast["speedup_over_stock"] >= data["speedup_over_stock"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"predicted"}
    assert main(["report", str(plan), *cluster]) == 2
    assert "-o PAGE.HTML" in capsys.readouterr().err
