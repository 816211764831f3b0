"""`plan --simplest` and `plan --memory` at the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.plan.file import load_plan
from megatron_hetero.schedule.stock import num_reasons_not_stock

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/rtx3080-rtx4090"
MODEL = ["--model", str(EXAMPLE / "gpt-1.3b.sh")]
CLUSTER = ["--cluster", str(EXAMPLE / "cluster.yaml")]
QUICK = ["--strategy", "symmetric"]
SMALL = EXAMPLE.parent / "one-workstation"


def test_the_simplest_plan_is_near_the_best_and_says_what_it_costs(tmp_path: Path, capsys) -> None:
    best, simple = tmp_path / "best.json", tmp_path / "simple.json"
    example = EXAMPLE.parent / "four-cards"
    job = ["--cluster", str(example / "both.yaml"), "--model", str(example / "llama-3b.flags")]
    assert main(["plan", *job, "--json", "-o", str(best)]) == 0
    of_best = json.loads(capsys.readouterr().out)
    assert main(["plan", *job, "--simplest", "50%", "--json", "-o", str(simple)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["simplest_within"] == 0.5
    assert data["step_time_s"] <= 1.5 * of_best["step_time_s"]
    assert data["fastest"]["step_time_s"] == pytest.approx(of_best["step_time_s"])
    assert data["fastest"]["slower_by"] < 0
    reasons = [num_reasons_not_stock(load_plan(path)) for path in (simple, best)]
    assert reasons[0] <= reasons[1]
    assert data["layout"] != of_best["layout"]
    assert of_best["simplest_within"] == 0.05


def test_with_much_room_the_simplest_is_what_stock_megatron_runs(capsys) -> None:
    assert main(["plan", *CLUSTER, *MODEL, *QUICK, "--simplest", "900%"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "not needed: stock Megatron runs this plan" in text


@pytest.mark.parametrize("part", ["5", "five%", "-5%", "%"])
def test_simplest_takes_a_percentage_alone(part: str, capsys) -> None:
    assert main(["plan", *CLUSTER, *MODEL, f"--simplest={part}"]) == 2
    assert f'--simplest "{part}": write a percentage, for example 5%' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--schedule", "best"], "--simplest does not go with --schedule best"),
        (["--strategy", "stock"], "--simplest does not go with --strategy stock"),
    ],
)
def test_simplest_is_refused_where_it_says_nothing(words: list[str], says: str, capsys) -> None:
    assert main(["plan", *CLUSTER, *MODEL, "--simplest", "5%", *words]) == 2
    assert says in capsys.readouterr().err


def test_utilization_is_printed_and_in_json(tmp_path: Path, capsys) -> None:
    path = tmp_path / "plan.json"
    cluster = ["--cluster", str(SMALL / "cluster.yaml")]
    model = ["--model", str(SMALL / "llama-1.5b.flags")]
    assert main(["plan", *cluster, *model, *QUICK, "-o", str(path)]) == 0
    text = capsys.readouterr().out
    assert "MFU" in text and "TFLOP/s" in text
    assert main(["explain", str(path), *cluster, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = data["utilization"]
    assert 0 < found["mfu_of_cluster"] <= found["mfu"] < 1
    per_gpu = found["model_flops"] / data["step_time_s"] / 3
    assert found["flops_per_s_per_gpu"] == pytest.approx(per_gpu)
    # The same object as of a simulated step, whose time alone is its own.
    assert main(["simulate", str(path), *cluster, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    ratio = data["step_time_s"] / simulated["step_time_s"]
    assert simulated["utilization"] == {
        name: pytest.approx(value * (1 if name == "model_flops" else ratio))
        for name, value in found.items()
    }


def test_memory_names_the_gpus_of_the_catalogue_without_a_cluster(capsys) -> None:
    assert main(["plan", "--memory", *MODEL, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    fewest = {gpu["gpu"]: gpu["num_gpus"] for gpu in data["gpus"]}
    assert fewest["A100-80GB"] == 1
    assert fewest["RTX-3080"] > 1
    assert "V100-16GB" in data["cannot_train"], "the job is in bf16"


def test_memory_with_a_cluster_looks_at_its_types_alone(capsys) -> None:
    assert main(["plan", "--memory", *CLUSTER, *MODEL, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {gpu["gpu"] for gpu in data["gpus"]} == {"RTX-3080", "RTX-4090"}
    assert data["cluster_holds_it"] is True and data["layout"]
    assert main(["plan", "--memory", *CLUSTER, *MODEL, "--simplest", "5%"]) == 2
    assert "--simplest does not go with it" in capsys.readouterr().err


def test_memory_says_whether_the_whole_cluster_holds_the_model(capsys) -> None:
    folder = EXAMPLE.parent / "four-cards"
    words = ["plan", "--memory", "--cluster", str(folder / "cluster.yaml"), "--model"]
    assert main([*words, str(folder / "llama-3b.flags"), "--", "--num-layers", "26"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "cluster.yaml: holds it, for example as tp4(" in shown
    tight = ["--", "--num-layers", "90"]
    assert main([*words, str(folder / "llama-3b.flags"), *tight]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "cluster.yaml: does not, as far as was tried" in shown


def test_memory_answers_a_misspelt_flag(tmp_path, capsys) -> None:
    text = (EXAMPLE.parent / "four-cards/llama-3b.flags").read_text()
    path = tmp_path / "gpt.flags"
    path.write_text(text.replace("--num-layers", "--num-layer"))
    assert main(["plan", "--memory", "--model", str(path)]) == 4
    assert "did you mean --num-layers?" in capsys.readouterr().err
    path.write_text(text + " --swiglo")
    assert main(["plan", "--memory", "--model", str(path)]) == 2
    assert "Did you mean --swiglu" in capsys.readouterr().err


def test_no_heading_is_cut_and_a_wide_gap_is_told_as_one(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    folder = EXAMPLE.parent / "four-cards"
    files = ["--cluster", str(folder / "cluster.yaml"), "--model", str(folder / "llama-3b.flags")]
    assert main(["plan", *files, "--", "--num-layers", "26"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (heading,) = (line.split() for line in lines if line.startswith(" stage"))
    assert heading == ["stage", "GPUs", "TP", "layers", "recompute", "time", "memory"]
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    assert "% longer: whether a faster one exists is not known" in text and "is within" not in text
    assert "the plan changes settings of the job: recompute full of some layers" in text


def test_memory_of_a_script_that_may_hold_more_flags_ends_with_1(tmp_path, capsys) -> None:
    flags = (EXAMPLE.parent / "four-cards/llama-3b.flags").read_text().split("\n")
    words = " ".join(line for line in flags if not line.startswith("#"))
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun pretrain_gpt.py {words} $MORE\n")
    assert main(["plan", "--memory", "--model", str(path)]) == 1
    assert "NOT ALL OF THE SCRIPT IS KNOWN" in capsys.readouterr().out
    assert main(["plan", "--memory", "--model", str(path), "--json"]) == 1
    assert "MORE" in " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert main(["plan", "--memory", "--model", str(path), "--model-env", "MORE="]) == 0
