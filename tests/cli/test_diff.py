"""`diff`: differences in words, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from megatron_hetero.cli.main import main


def test_equal_plans(layout_plan: Callable[..., Path], capsys) -> None:
    path = str(layout_plan())
    assert main(["diff", path, path]) == 0
    assert capsys.readouterr().out == "the plans are equal\n"


def test_moved_layer(layout_plan: Callable[..., Path], capsys) -> None:
    before = layout_plan("tp2:3,tp1:1 @4", "before.json")
    after = layout_plan("tp2:2,tp1:2 @4", "after.json")
    assert main(["diff", str(before), str(after)]) == 0
    out = capsys.readouterr().out
    assert "layers 0-2" in out
    assert out.endswith("2 differences\n")


def test_like_rows_are_one(layout_plan: Callable[..., Path], capsys) -> None:
    before = layout_plan(" | ".join(["tp2:3,tp1:1 @4"] * 12), "before.json")
    after = layout_plan(" | ".join(["tp2:2,tp1:2 @4"] * 12), "after.json")
    assert main(["diff", str(before), str(after)]) == 0
    out = capsys.readouterr().out
    assert "replicas 0-11, stage 0" in out
    assert out.endswith("24 differences, like ones in one row (all of them: --json): 2 rows\n")


def test_json(layout_plan: Callable[..., Path], capsys) -> None:
    before = layout_plan("tp1:4 @4", "before.json")
    after = layout_plan("tp1:4 @5", "after.json")
    main(["diff", str(before), str(after), "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "differences": [
            {"where": "replica 0", "what": "micro-batches", "before": "4", "after": "5"}
        ]
    }


def test_an_unreadable_plan_exits_with_4(layout_plan: Callable[..., Path], capsys) -> None:
    assert main(["diff", str(layout_plan()), "nowhere.json"]) == 4
    assert "error: nowhere.json" in capsys.readouterr().err
