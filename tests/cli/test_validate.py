"""`validate`: exit code 0 for a valid plan, 4 and the place for a broken one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.planner.api import plan_and_explain
from tests.cli.example import CLUSTER

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/one-workstation/llama-1.5b.flags"


def break_plan(path: Path) -> None:
    """Take a layer off the last stage of replica 1, as a slip of an editor would."""
    data = json.loads(path.read_text())
    data["replicas"][1]["stages"][0]["shape"]["num_layers"] = 3
    path.write_text(json.dumps(data, indent=2))


def test_valid(layout_plan: Callable[..., Path], capsys) -> None:
    path = layout_plan()
    assert main(["validate", str(path)]) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert words.endswith("is valid: tp2:3,tp1:1 @4 | tp1:4 @2")


def test_valid_as_json(layout_plan: Callable[..., Path], capsys) -> None:
    assert main(["validate", str(layout_plan()), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "valid": True,
        "layout": "tp2:3,tp1:1 @4 | tp1:4 @2",
        "num_devices": 4,
        "made_for_cluster": None,
    }


def test_a_missing_layer_is_named(layout_plan: Callable[..., Path], capsys) -> None:
    path = layout_plan()
    break_plan(path)
    assert main(["validate", str(path)]) == 4
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {path}:")
    assert "replica 1" in captured.err
    assert "layer 3" in captured.err


def test_a_broken_plan_as_json(layout_plan: Callable[..., Path], capsys) -> None:
    path = layout_plan()
    break_plan(path)
    assert main(["validate", str(path), "--json"]) == 4
    data = json.loads(capsys.readouterr().out)
    assert data["valid"] is False
    assert "replica 1" in data["error"]["message"]
    assert data["error"]["exit_code"] == 4


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--hidden-size", "4096"], "hidden_size: plan 2048, flags 4096"),
        (["--kv-channels", "256"], "kv_channels: plan 128, flags 256"),
        (["--mtp-num-layers", "1"], "mtp_num_layers: plan 0, flags 1"),
    ],
)
def test_flags_of_another_model_than_the_plans_are_named(
    more: list[str], said: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "plan.json"
    save_plan(plan_from_layout(parse_layout("tp1:24 @64"), load_workload(EXAMPLE)), path)
    assert main(["validate", str(path)]) == 0
    data = json.loads(path.read_text())
    data["workload"]["megatron_args"] += more
    path.write_text(json.dumps(data))
    assert main(["validate", str(path)]) == 4
    assert said in " ".join(capsys.readouterr().err.split())


def test_validate_against_the_cluster(plan_path: Path, capsys) -> None:
    assert main(["validate", str(plan_path), "--cluster", CLUSTER, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["made_for_cluster"] is True


def test_validate_says_when_the_cluster_is_another(plan_path: Path, tmp_path: Path, capsys) -> None:
    other = tmp_path / "cluster.yaml"
    text = Path(CLUSTER).read_text()
    assert "30 us" in text
    other.write_text(text.replace("30 us", "31 us"))
    assert main(["validate", str(plan_path), "--cluster", str(other)]) == 0
    assert "note: " in capsys.readouterr().err


@pytest.mark.parametrize(("names_its_file", "made_for"), [(True, True), (False, None)])
def test_an_unchanged_file_is_not_called_changed(
    names_its_file: bool, made_for: bool | None, tmp_path: Path, capsys
) -> None:
    """`plan --without` leaves machines out of the plan, and does not change the file; the plan of a
    layout names no file."""
    workload = load_workload(EXAMPLE, ["--num-layers", "2", "--hidden-size", "512"])
    cluster = load_cluster(CLUSTER)
    plan = plan_and_explain(cluster.without(["rtx-0"]), workload, strategy="symmetric")[0]
    path = tmp_path / "plan.json"
    save_plan(plan if names_its_file else replace(plan, inputs={}), path)
    assert main(["validate", str(path), "--cluster", CLUSTER, "--json"]) == 0
    said = capsys.readouterr()
    assert "note" not in said.err
    assert json.loads(said.out)["made_for_cluster"] is made_for


def test_validate_refuses_hardware_that_is_not_there(
    plan_path: Path, tmp_path: Path, capsys
) -> None:
    other = tmp_path / "cluster.yaml"
    text = Path(CLUSTER).read_text()
    other.write_text(
        text.replace("gpu: RTX-4090", "gpu: RTX-3090").replace(" RTX-4090:", " RTX-3090:")
    )
    assert main(["validate", str(plan_path), "--cluster", str(other)]) == 4
    assert "RTX-4090" in capsys.readouterr().err
