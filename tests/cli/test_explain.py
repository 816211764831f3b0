"""`explain` on the example that the README shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.planner.advise.what_if import WhatToAdd, what_to_add
from tests.cli.example import CLUSTER


def test_explain_shows_the_figures_of_the_file(plan_path: Path, capsys) -> None:
    assert main(["explain", str(plan_path)]) == 0
    out = capsys.readouterr().out
    assert "step time" in out
    assert f"those that {plan_path} holds" in out.replace("\n", " ")
    assert "--cluster CLUSTER.YAML to score it anew" in out.replace("\n", " ")
    assert "Where the time goes" not in out


def test_explain_with_the_cluster_says_why(plan_path: Path, capsys) -> None:
    assert main(["explain", str(plan_path), "--cluster", CLUSTER]) == 0
    out = capsys.readouterr().out
    assert "CLUSTER.YAML" not in out
    for words in ("Where the time goes", "pipeline bubble", "Memory left", "next best"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


def test_explain_scores_a_plan_as_the_planner_did(plan_path: Path, capsys) -> None:
    main(["explain", str(plan_path), "--json"])
    from_file = json.loads(capsys.readouterr().out)
    main(["explain", str(plan_path), "--cluster", CLUSTER, "--json"])
    anew = json.loads(capsys.readouterr().out)
    assert anew["step_time_s"] == from_file["step_time_s"]
    assert from_file["explanation"] is None
    assert (from_file["scored_anew"], anew["scored_anew"]) == (False, True)
    parts = anew["explanation"]["time_by_cause"]
    assert sum(parts.values()) == pytest.approx(anew["step_time_s"])


def test_explain_refuses_a_profile_without_a_cluster(plan_path: Path, capsys) -> None:
    assert main(["explain", str(plan_path), "--profile", "profile.json"]) == 2
    assert "give --cluster too" in capsys.readouterr().err


def test_explain_says_what_to_add_first(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    cluster, path = small
    found_once: list[WhatToAdd] = []

    def once(*args: object, **named: object) -> WhatToAdd:
        if not found_once:
            found_once.append(what_to_add(*args, **named, num_planned=1))  # type: ignore[arg-type]
        return found_once[0]

    monkeypatch.setattr("megatron_hetero.cli.explain.what_to_add", once)
    words = ["explain", str(path), "--what-if"]
    assert main(words) == 2
    assert "give --cluster" in capsys.readouterr().err
    words += ["--cluster", str(cluster)]
    assert main([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = data["what_if"]
    assert found[0]["gain"] == 1 - found[0]["step_time_s"] / data["what_if_from_s"]
    assert found[0]["what"].startswith("one more machine like") and found[0]["gain"] > 0.1
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "What to add first" in out and found[0]["what"] in out
    assert max(map(len, out.splitlines())) <= 100
