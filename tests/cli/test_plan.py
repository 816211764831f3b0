"""`plan` on the example that the README shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.structure_search import StructureSearch
from tests.cli.example import CLUSTER, MODEL, PLAN, QUICK, Printed


def test_plan_prints_what_it_writes(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "-o", str(path)]) == 0
    out = capsys.readouterr().out
    plan = load_plan(path)
    assert format_layout(plan.layout) in out
    for words in ("step time", "tokens/s", "lower bound", "not measured", "best of stock"):
        assert words in out
    assert max(map(len, out.splitlines())) <= 100


def test_plan_without_output_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*PLAN, *QUICK]) == 0
    assert "Nothing was written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_plan_as_json(printed: Printed) -> None:
    data = json.loads(printed.out)
    assert printed.err == ""
    plan = load_plan(printed.path)
    assert plan.estimates is not None
    assert data["plan"] == str(printed.path)
    assert data["layout"] == format_layout(plan.layout)
    assert data["step_time_s"] == plan.estimates.step_time_s
    assert data["bound_s"] <= data["step_time_s"]
    assert data["gap"] == pytest.approx(data["step_time_s"] / data["bound_s"] - 1)
    assert data["measured"] is False
    assert data["idle_devices"] == list(plan.idle_devices)
    assert data["stock_megatron"] is False
    assert data["best_stock"]["slower_by"] > 0.1
    assert data["best_stock"]["step_time_s"] > data["step_time_s"]
    assert data["best_stock"]["layout"] != data["layout"]
    assert data["best_stock"]["settings"] == "4 layers of a stage recomputed"
    assert data["stock_shortage"] is None
    assert data["search_s"] > 0


def test_the_best_plan_of_stock_megatron_can_be_had(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "--strategy", "stock", "-o", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["stock_megatron"] is True
    assert data["step_time_s"] == data["best_stock"]["step_time_s"]
    assert data["bound_s"] <= data["step_time_s"]
    assert main(["flags", str(path)]) == 0
    assert "--recompute-method block" in " ".join(capsys.readouterr().out.split())


def test_with_less_memory_stock_megatron_recomputes_more(tmp_path: Path, capsys) -> None:
    text = Path(CLUSTER).read_text()
    tighter = tmp_path / "cluster.yaml"
    tighter.write_text(text + "limits: {memory_reserve: 3.5 GiB}\n")
    assert main(["plan", "--cluster", str(tighter), "--model", MODEL, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["best_stock"]["settings"] == "5 layers of a stage recomputed"
    assert data["stock_shortage"] is None


def test_megatron_flags_after_the_double_dash_change_the_model(capsys) -> None:
    assert main([*PLAN, "--json", "--", "--num-layers", "16"]) == 0
    layout = json.loads(capsys.readouterr().out)["layout"]
    replica = layout.partition("@")[0]
    assert sum(int(stage.partition(":")[2]) for stage in replica.split(",")) == 16


def test_a_model_that_fits_nowhere_exits_with_3(capsys) -> None:
    assert main([*PLAN, *QUICK, "--", "--num-layers", "96"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--swigul"], "Did you mean --swiglu"),
        (["--foo"], "--foo is not a flag of Megatron"),
        (["--hetero-layout", "tp1:32 @32"], "--hetero-layout is decided by the plan"),
        (["--spec", "my.module", "f"], "may not carry it"),
    ],
)
def test_flags_that_no_run_would_take_are_found_when_planning(
    words: list[str], says: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "-o", str(path), "--", *words]) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert captured.out == ""
    assert not path.exists()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--cluster", "nowhere.yaml", "--model", MODEL], 4),
        (["--cluster", CLUSTER, "--model", "nowhere.sh"], 4),
        (["--cluster", CLUSTER, "--model", MODEL, "--profile", "nowhere.json"], 4),
    ],
)
def test_files_that_cannot_be_read(words: list[str], code: int, capsys) -> None:
    assert main(["plan", *words]) == code
    assert "nowhere" in capsys.readouterr().err


def test_a_strategy_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "-o", str(path), "--json", "--strategy", "columns"]) == 0
    assert json.loads(capsys.readouterr().out)["interrupted"] is False
    made_by = load_plan(path).made_by
    assert made_by is not None and made_by.endswith("strategy columns")
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, "--strategy", "magic"])
    assert "choose auto, columns" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*PLAN, "--strategy", "structures"])
    assert "use auto" in capsys.readouterr().err


def test_an_interrupted_search_gives_its_best_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C once a plan is found: the plan is written, and the exit code says what happened."""
    path = tmp_path / "plan.json"

    def interrupted(self: StructureSearch, board: Scoreboard) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(StructureSearch, "search", interrupted)
    assert main([*PLAN, "-o", str(path), "--json"]) == 130
    captured = capsys.readouterr()
    assert json.loads(captured.out)["interrupted"] is True
    assert "best plan found so far" in captured.err
    made_by = load_plan(path).made_by
    assert made_by is not None and made_by.endswith("(interrupted)")


def test_a_search_that_is_interrupted_before_any_plan_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"

    def interrupted(self: Columns, board: Scoreboard) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Columns, "search", interrupted)
    assert main([*PLAN, "-o", str(path)]) == 130
    assert not path.exists()


def priced_cluster(tmp_path: Path) -> str:
    text = Path(CLUSTER).read_text()
    for name, price in (("a100-0", 2.0), ("rtx-0", 1.6)):
        assert f"{{name: {name}," in text
        text = text.replace(f"{{name: {name},", f"{{name: {name}, price_per_hour: {price},")
    path = tmp_path / "priced.yaml"
    path.write_text(text)
    return str(path)


def test_plan_for_a_run_with_limits(tmp_path: Path, capsys) -> None:
    path = tmp_path / "stock.json"
    words = ["plan", "--cluster", priced_cluster(tmp_path), "--model", MODEL, "--stock"]
    words += ["--tokens", "1B", "--deadline", "200 h", "--objective", "cheapest", "-o", str(path)]
    words += QUICK
    job = ("--", "--num-layers", "8")
    assert main([*words, *job]) == 0
    out = capsys.readouterr().out
    for text in ("whole run", "it costs", "the deadline is 200 h", "for a million tokens"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 100
    assert main([*words, "--json", *job]) == 0
    shown = json.loads(capsys.readouterr().out)
    outcome = shown["outcome"]
    assert shown["stock_megatron"] and outcome["objective"] == shown["objective"] == "cheapest"
    assert outcome["run_hours"] <= outcome["deadline_hours"] == 200
    assert outcome["bound"] <= outcome["value"] == pytest.approx(shown["price_per_million_tokens"])
    assert outcome["run_price"] == pytest.approx(outcome["value"] * 1000)
    assert main(["flags", str(path)]) == 0
    assert "--hetero" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--deadline", "3"], 2, "--deadline: .* without a unit"),
        (["--tokens", "much"], 2, '--tokens: "much" is not a number'),
        (["--tokens", "1B", "--steps", "7"], 2, "give one of them"),
        (["--objective", "fewest-gpus"], 2, "give --deadline"),
        (["--budget", "5", "--steps", "10"], 2, "has none for a100-0, rtx-0"),
        (["--steps", "1000", "--deadline", "1 h", *QUICK], 3, r"would keep --deadline [0-9.]+ h"),
    ],
)
def test_goals_that_make_no_sense(words: list[str], code: int, message: str, capsys) -> None:
    assert main([*PLAN, *words]) == code
    assert re.search(message, capsys.readouterr().err)
