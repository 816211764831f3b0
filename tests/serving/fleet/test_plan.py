"""Names of a serving plan become files, commands and addresses: unsound ones are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.serving.fleet.file import load_serving_plan
from tests.serving.route.plans import two_replicas


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("replica", {"name": "../../outside"}, r"replica '../../outside': allowed are 1 to 63"),
        ("replica", {"name": ""}, "replica '': allowed"),
        ("class", {"name": "x\n$(id)"}, r"class 'x\\n\$\(id\)': allowed"),
        ("stage", {"host": "; rm -rf /"}, "host '; rm -rf /' is no host name"),
        ("stage", {"devices": ["a:x"]}, "device 'a:x' is not machine:index"),
        ("stage", {"devices": ["a"]}, "device 'a' is not machine:index"),
    ],
)
def test_unsound_names_are_refused(
    tmp_path: Path, part: str, change: dict[str, Any], message: str, capsys
) -> None:
    path = two_replicas(tmp_path / "serve.json")
    data = json.loads(path.read_text(encoding="utf-8"))
    replica = data["plan"]["replicas"][0]
    parts = {
        "replica": replica, "class": data["plan"]["classes"][0], "stage": replica["stages"][0]
    }  # fmt: skip
    parts[part].update(change)
    path.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(PlanFormatError, match=message):
        load_serving_plan(path)
    assert main(["launch", str(path), "--for", "ssh", "-o", str(tmp_path / "fleet")]) == 4
    assert "allowed" in (said := capsys.readouterr().err) or "machine:index" in said
    assert not (tmp_path / "fleet").exists()


def test_plans_of_training_and_of_serving_are_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training, serving = tmp_path / "plan.json", two_replicas(tmp_path / "serve.json")
    save_plan(plan_from_layout(parse_layout("tp1:3 @2")), training)
    assert main(["route", str(training), "--replica", "a=http://x"]) == 4
    assert "this is a plan of training; a serving plan is what" in capsys.readouterr().err
    assert main(["explain", str(serving)]) == 4
    assert "this is a serving plan, which `launch` and `doctor` read" in capsys.readouterr().err
    training.write_text("[]")
    with pytest.raises(PlanFormatError, match="this is no plan"):
        load_serving_plan(training)
