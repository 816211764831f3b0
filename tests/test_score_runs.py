"""Predictions scored against measured runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.schedule.estimate import estimate_plan

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools import score_runs  # noqa: E402

CLUSTER = """version: 1
nodes: [{name: a, gpu: A100-40GB, count: 2}]
links: {inside_node: {A100-40GB: {bandwidth: 200 GB/s, latency: 5 us}}}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    workload = load_workload(
        None,
        ["--num-layers=4", "--hidden-size=512", "--num-attention-heads=8", "--seq-length=512",
         "--max-position-embeddings=512", "--vocab-size=1000", "--micro-batch-size=1",
         "--global-batch-size=4", "--bf16"],
    )  # fmt: skip
    cluster = load_cluster(tmp_path / "cluster.yaml")
    plan = place_in_order(plan_from_layout(parse_layout("tp1:3,tp1:1 @4"), workload), cluster)
    save_plan(plan, tmp_path / "plan.json")
    return tmp_path


def runs_file(folder: Path, **measured: Any) -> Path:
    run = {"name": "one", "source": "a test", "cluster": "cluster.yaml", "plan": "plan.json"}
    path = folder / "RUNS.yaml"
    path.write_text(json.dumps({"version": 1, "runs": [{**run, "measured": measured}]}))
    return path


def test_errors_are_those_of_the_prediction(folder: Path) -> None:
    cluster = load_cluster(folder / "cluster.yaml")
    plan = score_runs.load_plan(folder / "plan.json")
    predicted = estimate_plan(plan, cluster)
    device = predicted.devices["a:0"]
    held = device.tensor_bytes
    path = runs_file(
        folder,
        step_time_s=[predicted.step_time_s, predicted.step_time_s * 2, 9.0e4],
        stage_times_s=[[predicted.stage_times_s[0][0], None]],
        boundary_times_s=[[predicted.boundary_times_s[0][0] / 2]],
        peak_bytes={"a:0": held * 2},
    )
    found = {one.term: one.error for one in score_runs.score(path)}
    assert found == pytest.approx({"step": -0.5, "stage": 0.0, "boundary": 1.0, "bytes": -0.5})
    text = "\n".join(score_runs.tables(score_runs.score(path)))
    assert "| bytes | 1 | 50.0% | 50.0% | 50.0% |" in text


def test_steps_are_scored_by_card_precision_size_and_cause(folder: Path) -> None:
    cluster = load_cluster(folder / "cluster.yaml")
    step_s = estimate_plan(score_runs.load_plan(folder / "plan.json"), cluster).step_time_s
    path = runs_file(folder, step_time_s=step_s / 2)
    one = json.loads(path.read_text())["runs"][0]
    two = {
        **one,
        "name": "two",
        "cause": "norms not fused",
        "measured": {"step_time_s": 2 * step_s},
    }
    path.write_text(json.dumps({"version": 1, "runs": [one, two]}))
    text = "\n".join(score_runs.tables(score_runs.score(path)))
    assert "| all |  | 2 | 75.0% | +25.0% | +100.0% | 0% of 1 |" in text
    assert "| card | A100-40GB | 2 |" in text and "| precision | bf16 | 2 |" in text
    assert "| size | under 1B | 2 |" in text
    assert "| cause | norms not fused | 1 | 50.0% | -50.0% | -50.0% |  |" in text


def test_bytes_of_tensors_are_compared_by_the_parts_that_were_counted(folder: Path) -> None:
    cluster = load_cluster(folder / "cluster.yaml")
    of = estimate_plan(score_runs.load_plan(folder / "plan.json"), cluster).devices["a:1"]
    parts = {"weights": of.parts_bytes["weights"], "gradients": 2 * of.parts_bytes["gradients"]}
    path = runs_file(folder, step_time_s=1.0, live_bytes={"a:1": parts})
    (found,) = [one for one in score_runs.score(path) if one.term == "live bytes"]
    predicted = of.parts_bytes["weights"] + of.parts_bytes["gradients"]
    assert found.error == pytest.approx(predicted / sum(parts.values()) - 1)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ({"step_time_s": 0.0}, "step_time_s"),
        ({"step_time_s": 1.0, "steps": 3}, "steps"),
        ({"step_time_s": 1.0, "stage_times_s": [[1.0]]}, "put null where"),
        ({"step_time_s": 1.0, "peak_bytes": {"b:7": 1}}, "which the plan does not use"),
        (
            {"step_time_s": 1.0, "live_bytes": {"b:7": {"weights": 1}}},
            "which the plan does not use",
        ),
        ({"step_time_s": 1.0, "live_bytes": {"a:0": {"libraries": 1}}}, "live_bytes"),
    ],
)
def test_a_wrong_file_is_refused(
    measured: dict[str, Any], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert score_runs.main([str(runs_file(folder, **measured))]) == 4
    assert said in capsys.readouterr().err
