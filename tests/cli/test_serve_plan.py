"""`serve-plan`, and `launch` and `doctor` of what it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/serving"
INPUTS = [
    "--cluster", str(EXAMPLE / "cluster.yaml"), "--model", str(EXAMPLE),
    "--workload", str(EXAMPLE / "workload.yaml"),
]  # fmt: skip


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "serve.json"
    assert main(["serve-plan", *INPUTS, "--goal", "cost", "-o", str(path)]) == 0
    return path


def test_it_prints_replicas_classes_and_the_bound(plan: Path, capsys) -> None:
    words = ["serve-plan", *INPUTS, "--goal", "cost", "--from", str(plan), "--stable", "2 h"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert "chat" in text
    assert "no fleet of these shapes serves the rates for less" in text.replace("\n", " ")
    assert "replicas stay, 0 stop, 0 start" in text


def test_json_is_the_file(plan: Path, capsys) -> None:
    assert main(["serve-plan", *INPUTS, "--goal", "cost", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(plan.read_text())


def test_measured_steps_win_over_tables_and_are_named(tmp_path: Path, capsys) -> None:
    header = "gpu,engine,version,model,width,weights,phase,tokens,context,batch,seconds\n"
    row = "L40S,vllm,0.32,llama,1,16-bit,decode,1,512,{batch},{seconds}\n"
    slow = tmp_path / "slow.csv"
    slow.write_text(header + row.format(batch=1, seconds=0.1) + row.format(batch=64, seconds=0.3))
    found = []
    for words in ([], ["--profile", str(slow)]):
        assert main(["serve-plan", *INPUTS, *words, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out)["plan"])
    # The measured cards are slower, and no other price has changed.
    assert found[1]["bound"] < found[0]["bound"]
    bases = {p["decode"] for p in found[1]["prices"] if p["gpu"] == "L40S"}
    assert bases <= {"2 steps measured (vllm 0.32)", "2 steps measured at tp1 (vllm 0.32)"}
    assert main(["serve-plan", *INPUTS, "--profile", str(slow)]) == 0
    assert "decode: 2 steps measured" in capsys.readouterr().out.replace("\n", " ")
    slow.write_text(header + row.format(batch=0, seconds=0.1))
    assert main(["serve-plan", *INPUTS, "--profile", str(slow)]) == 4
    assert f"{slow}:2: batch" in capsys.readouterr().err
    assert main(["serve-plan", *INPUTS, "--profile", str(tmp_path / "none.csv")]) == 4


def test_launch_and_doctor_know_the_plan(plan: Path, tmp_path: Path, capsys) -> None:
    assert main(["doctor", str(plan), "--cluster", str(EXAMPLE / "cluster.yaml")]) == 0
    assert main(["launch", str(plan), "--for", "vllm", "-o", str(tmp_path / "fleet")]) == 0
    assert "vllm serve" in (tmp_path / "fleet" / "replica-0.sh").read_text()
    assert main(["launch", str(plan), "--for", "llm-d", "-o", str(tmp_path / "pods")]) == 0
    pods = "".join(path.read_text() for path in (tmp_path / "pods").iterdir())
    assert "kind: Deployment" in pods
    assert main(["launch", str(plan), "--for", "slurm", "-o", str(tmp_path / "b")]) == 2
    assert "is a serving plan" in capsys.readouterr().err
    # These were ignored.
    words = ["launch", str(plan), "--for", "vllm", "-o", str(tmp_path / "b")]
    assert main([*words, "--image", "x"]) == 2
    assert "--for vllm starts no container" in capsys.readouterr().err
    assert main([*words, "--time", "10"]) == 2
    assert "--time: " in capsys.readouterr().err
    assert main(["explain", str(plan)]) == 4


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--budget", "-1"], 2, "buys nothing"),
        (["--budget", "0.5"], 3, "buys no set of replicas"),
        (["--gap", "2"], 2, "between 0 and 1"),
        (["--load-bandwidth", "1 GB/s"], 2, "goes with --from"),
    ],
)
def test_bad_arguments_have_a_clear_answer(
    words: list[str], code: int, message: str, capsys
) -> None:
    assert main(["serve-plan", *INPUTS, *words]) == code
    assert message in capsys.readouterr().err
