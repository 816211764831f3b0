"""`plan` and `explain` on the example that the README shows."""

from __future__ import annotations

import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner.advise.what_if import WhatIf, what_to_add
from megatron_hetero.planner.columns.strategy import Columns
from megatron_hetero.planner.evaluate.scoreboard import Scoreboard
from megatron_hetero.planner.structure_search import StructureSearch

ROOT = Path(__file__).resolve().parents[2]
CLUSTER = str(ROOT / "examples/a100-rtx4090/cluster.yaml")
MODEL = str(ROOT / "examples/a100-rtx4090/gpt-7b.sh")
PLAN = ["plan", "--cluster", CLUSTER, "--model", MODEL]


QUICK = ("--strategy", "symmetric")
"""For what does not depend on how well was searched."""


@dataclass(frozen=True)
class Printed:
    """What `plan --json` wrote and printed."""

    path: Path
    out: str
    err: str


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Printed:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        assert main([*PLAN, "-o", str(path), "--json"]) == 0
    return Printed(path, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def plan_path(printed: Printed) -> Path:
    return printed.path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Three of the GPUs and a plan of four of the layers, for verbs that plan again."""
    folder = tmp_path_factory.mktemp("small")
    cluster, path = folder / "cluster.yaml", folder / "plan.json"
    text = Path(CLUSTER).read_text()
    assert "count: 4" in text
    cluster.write_text(text.replace("count: 4", "count: 2"))
    words = ["plan", "--cluster", str(cluster), "--model", MODEL, *QUICK, "-o", str(path)]
    assert main([*words, "--json", "--", "--num-layers", "4"]) == 0
    return cluster, path


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


def test_flags_of_the_plan_name_every_node(plan_path: Path, capsys) -> None:
    assert main(["flags", str(plan_path), "--style", "line"]) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if not x.startswith("#")]
    plan = load_plan(plan_path)
    assert len(lines) == len(plan.hosts)
    for host, line in zip(plan.hosts, lines, strict=True):
        assert f"--nproc-per-node {len(host.gpu_indices)} " in line


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


def test_explain_says_what_to_add_first(
    small: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    cluster, path = small
    found_once: list[tuple[WhatIf, ...]] = []

    def once(*args: object, **named: object) -> tuple[WhatIf, ...]:
        if not found_once:
            found_once.append(what_to_add(*args, **named, num_planned=1))  # type: ignore[arg-type]
        return found_once[0]

    monkeypatch.setattr("megatron_hetero.cli.explain.what_to_add", once)
    words = ["explain", str(path), "--what-if"]
    assert main(words) == 2
    assert "give --cluster" in capsys.readouterr().err
    words += ["--cluster", str(cluster)]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["what_if"]
    assert found[0]["what"].startswith("one more machine like") and found[0]["gain"] > 0.1
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "What to add first" in out and found[0]["what"] in out
    assert max(map(len, out.splitlines())) <= 100


def test_planning_again_for_a_script_that_may_hold_more_flags_ends_with_1(
    small: tuple[Path, Path], tmp_path: Path, capsys
) -> None:
    cluster, old = small
    workload = load_plan(old).workload
    assert workload is not None
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun pretrain_gpt.py {' '.join(workload.megatron_args)} $MORE\n")
    words = ["plan", "--cluster", str(cluster), "--near", str(old), "--model", str(path)]
    assert main(words) == 1
    assert "NOT ALL OF THE SCRIPT IS KNOWN" in capsys.readouterr().out
    assert main([*words, "--json"]) == 1
    assert "MORE" in " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert main([*words, "--model-env", "MORE="]) == 0


def test_planning_again_near_an_old_plan(small: tuple[Path, Path], tmp_path: Path, capsys) -> None:
    cluster, old = small
    smaller = tmp_path / "smaller.yaml"
    smaller.write_text(cluster.read_text().replace("count: 2", "count: 1"))
    path = tmp_path / "after.json"
    words = ["plan", "--cluster", str(smaller), "--near", str(old), "-o", str(path)]
    words += ["--store-bandwidth", "1 GB/s", "--steps", "100"]
    assert main([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    way = shown["ways"][shown["chosen"]]
    assert shown["layout"] == way["layout"] == format_layout(load_plan(path).layout)
    assert all(w["moved_bytes"] >= 0 and w["move_s"] is not None for w in shown["ways"])
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Ways to go on" in out and "to fetch" in out and "a step took" in out
    assert max(map(len, out.splitlines())) <= 100
    for bad, message in (
        (["--near", str(old), "--store-bandwidth", "5"], "--store-bandwidth: .* without a"),
        (["--prefer", "near", "--model", MODEL], "--prefer goes with --near"),
    ):
        assert main(["plan", "--cluster", str(smaller), *bad]) == 2
        assert re.search(message, capsys.readouterr().err)
