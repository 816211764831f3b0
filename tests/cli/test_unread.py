"""Options that a use of a verb does not read: refused by name, in place of having no effect."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from tests.cli.example import CLUSTER, MODEL

_LENGTHS = "4096 3\n128 40\n"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--memory", "--strategy", "exact"], "--strategy does"),
        (["--memory", "--objective", "cheapest", "--budget", "5"], "--objective, --budget do"),
        (["--memory", "--stage-precision", "mixed"], "--stage-precision does"),
        (["--sequences", "LENGTHS", "--deadline", "1 h"], "--deadline does"),
        (["--sequences", "LENGTHS", "--sends", "buffered"], "--sends does"),
        (["--sequences", "LENGTHS", "--memory"], "--memory does"),
    ],
)
def test_plan_names_what_another_question_does_not_read(
    words: list[str], names: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(_LENGTHS)
    words = [str(path) if word == "LENGTHS" else word for word in words]
    assert main(["plan", "--cluster", CLUSTER, "--model", MODEL, *words]) == 2
    assert f"so {names} not go with it" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--plugin-gain", "9%"], ["--objective", "cheapest"], ["--objective", "fewest-gpus"]],
)
def test_planning_again_has_the_fastest_ways_alone(words: list[str], capsys) -> None:
    assert main(["plan", "--cluster", CLUSTER, "--near", "old.json", *words]) == 2
    assert "does not go with --near yet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["--strategy", "columns"],
        ["--schedule", "best"],
        ["--simplest", "5%"],
        ["--stock"],
        ["--objective", "fewest-gpus", "--deadline", "9 d", "--steps", "9"],
    ],
)
def test_a_gain_of_the_plug_in_is_of_the_usual_search(words: list[str], capsys) -> None:
    words = ["plan", "--cluster", CLUSTER, "--model", MODEL, "--plugin-gain", "9%", *words]
    assert main(words) == 2
    assert "--plugin-gain does not go with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["plan.json", "--cluster", CLUSTER, "--short"], "--short does"),
        (["plan.json", "--cluster", CLUSTER, "-o", "here"], "--output does"),
        (["plan.json", "--cluster", CLUSTER, "--time-limit", "9"], "--time-limit does"),
        (["plan.json", "--cluster", CLUSTER, "--on-cluster", "--gpu", "L4"], "--gpu does"),
        (["--train", "--env", "NCCL_ALGO=Tree"], "--env does"),
        (["--train", "--profile", "profile.json"], "--profile does"),
    ],
)
def test_doctor_names_what_it_does_not_look_at(
    words: list[str], names: str, plan_path: Path, capsys
) -> None:
    words = [str(plan_path) if word == "plan.json" else word for word in words]
    assert main(["doctor", *words]) == 2
    assert f"so {names} not go with it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["launch", "--status", "job", "--name", "other"], "--name does"),
        (["launch", "--stop", "job", "--", "--lr", "1"], "Megatron's flags do"),
        (["probe", "--pairs", "--seconds", "9"], "--seconds does"),
        (["probe", "--links", "--gpu", "L4", "--widths", "2"], "--gpu, --widths do"),
    ],
)
def test_other_verbs_name_what_they_do_not_read(words: list[str], names: str, capsys) -> None:
    assert main(words) == 2
    assert f"so {names} not go with it" in capsys.readouterr().err


def test_memory_looks_at_what_is_left_of_a_cluster(tmp_path: Path, capsys) -> None:
    words = ["plan", "--memory", "--model", MODEL]
    assert main([*words, "--cluster", CLUSTER, "--without", "a100-0", "--json"]) == 0
    held = json.loads(capsys.readouterr().out)
    assert {gpu["gpu"] for gpu in held["gpus"]} == {"RTX-4090"}
    assert main([*words, "--without", "a100-0"]) == 2
    assert "--without takes machines out of a cluster" in capsys.readouterr().err
