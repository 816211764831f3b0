from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan, save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.schedule.of_plan import check_schedules

EXAMPLE = Path(__file__).parents[2] / "examples" / "a100-rtx4090"
PLAN = [
    "--layout",
    "tp1:16,tp2:8,tp2:8 @32",
    f"--cluster={EXAMPLE / 'cluster.yaml'}",
    f"--model={EXAMPLE / 'gpt-7b.sh'}",
]


def test_schedules_are_compared_and_one_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    assert main(["schedule", *PLAN, "--kind=synthesised", "-o", str(path), "--json"]) == 0
    first, *others = json.loads(capsys.readouterr().out)["schedules"]
    assert first["kind"] == "1f1b"
    assert [o["kind"] for o in others] == ["interleaved", "zero-bubble", "synthesised"]
    found = others[-1]
    assert found["pipeline_times_s"][0] <= first["pipeline_times_s"][0]
    plan = load_plan(path)
    assert plan.schedule == "synthesised"
    assert all(stage.order for stage in plan.replicas[0].stages)
    check_schedules(plan)
    assert main(["simulate", str(path), PLAN[2], "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["pipelines_s"] == pytest.approx(found["pipeline_times_s"][0])
    assert main(["explain", str(path), PLAN[2], "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    assert explained["step_time_s"] == pytest.approx(simulated["step_time_s"], rel=1e-3)
    assert explained["bound_s"] is None  # the layout does not fit: no plan of the space


def test_what_cannot_be_had_says_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["schedule", *PLAN, "--chunks=9"]
    assert main([*words, "--json"]) == 0
    kinds = {k["kind"]: k for k in json.loads(capsys.readouterr().out)["schedules"]}
    assert "a stage of 8 layers for 9 chunks" in kinds["interleaved"]["unavailable"]
    path = tmp_path / "none.json"
    assert main([*words, "--kind=interleaved", "-o", str(path)]) == 1
    assert "for 9 chunks" in capsys.readouterr().err
    assert not path.exists()


def test_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *PLAN]) == 0
    out = capsys.readouterr().out
    assert "relative" in out
    assert "zero-bubble" in out


def test_backward_passes_are_split_only_where_the_job_can(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def kinds(*flags: str) -> dict[str, dict[str, object]]:
        assert main(["schedule", *PLAN, "--json", "--", *flags]) == 0
        return {k["kind"]: k for k in json.loads(capsys.readouterr().out)["schedules"]}

    assert "--transformer-impl local" in str(kinds()["zero-bubble"]["unavailable"])
    local = "--transformer-impl=local", "--attention-backend=flash"
    overlap = kinds(*local, "--overlap-grad-reduce")["zero-bubble"]
    assert "--overlap-grad-reduce" in str(overlap["unavailable"])
    assert "pipeline_times_s" in kinds(*local)["zero-bubble"]


@pytest.mark.parametrize("words", [["--kind=zero-bubble"], ["--chunks=1"]])
def test_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *PLAN, *words]) == 2
    assert capsys.readouterr().err


CLUSTER = """\
version: 1
nodes:
  - {name: a, gpu: RTX-4090, count: 2}
  - {name: b, gpu: RTX-3090, count: 2}
links:
  inside_node:
    RTX-4090: {bandwidth: 20 GB/s, latency: 12 us}
    RTX-3090: {bandwidth: 10 GB/s, latency: 15 us}
  between_nodes: {bandwidth: 1 Gb/s, latency: 50 us}
"""
JOB = ["--num-layers=8", "--hidden-size=512", "--num-attention-heads=8", "--seq-length=512"]
JOB += ["--max-position-embeddings=512", "--vocab-size=32000", "--micro-batch-size=1"]
JOB += ["--global-batch-size=16", "--bf16", "--use-distributed-optimizer"]


def two_replicas(tmp_path: Path, first: str, second: str) -> Path:
    """A plan of two replicas, each from a machine to the other, over one link."""
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    cluster = load_cluster(tmp_path / "cluster.yaml")
    layout = parse_layout(f"{first} @8 | {second} @8")
    workload = load_workload(None, JOB)
    plan = place_in_order(replace(plan_from_layout(layout, workload), workload=workload), cluster)
    # Not in the order of the devices: first stages on one machine, last ones on the other.
    names = iter(["a:0", "b:0", "a:1", "b:1"])
    replicas = [
        replace(r, stages=tuple(replace(s, devices=(next(names),)) for s in r.stages))
        for r in plan.replicas
    ]
    save_plan(replace(plan, replicas=tuple(replicas)), tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_times_are_those_of_simulate_where_replicas_share_a_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        str(two_replicas(tmp_path, "tp1:4,tp1:4", "tp1:5,tp1:3")),
        f"--cluster={tmp_path / 'cluster.yaml'}",
        "--json",
    ]
    assert main(["schedule", *words]) == 0
    first = json.loads(capsys.readouterr().out)["schedules"][0]
    assert main(["simulate", *words]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert max(first["pipeline_times_s"]) == simulated["pipelines_s"]


def test_no_order_is_written_that_the_plan_may_not_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = two_replicas(tmp_path, *["tp1:4z4,tp1:4"] * 2), tmp_path / "other.json"
    words = [str(path), f"--cluster={tmp_path / 'cluster.yaml'}"]
    for kind in ("interleaved", "synthesised"):
        assert main(["schedule", *words, f"--kind={kind}", "-o", str(out)]) == 1
        assert "sharded layers" in capsys.readouterr().err
        assert not out.exists()
