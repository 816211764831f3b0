"""`init --job`: a script that `plan` reads, and in which `doctor` finds what is missing."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.flags.needed import NEEDED, missing_flags
from megatron_hetero.model.load import load_workload

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLUSTER = str(EXAMPLES / "three-gpus" / "cluster.yaml")
CONFIG = str(EXAMPLES / "three-gpus" / "config.json")
SCRIPT = str(EXAMPLES / "rtx3080-rtx4090" / "gpt-1.3b.sh")
SIZES = ["--seq-length", "2048", "--global-batch-size", "8", "--micro-batch-size", "1"]


def job_of(tmp_path: Path, *words: str) -> Path:
    path = tmp_path / "train.sh"
    assert main(["init", "--job", "-o", str(path), *words]) == 0
    return path


def findings(plan: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[dict[str, str]]:
    capsys.readouterr()
    main(["doctor", str(plan), "--cluster", CLUSTER, "--json", *more])
    found: list[dict[str, str]] = json.loads(capsys.readouterr().out)["findings"]
    return [finding for finding in found if finding["id"] == "flags-missing"]


def test_what_is_missing_is_found_until_it_is_filled_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a config.json to a job that starts: written, planned, examined, filled in, examined."""
    script = job_of(tmp_path, "--model", CONFIG, "--", *SIZES)
    plan = tmp_path / "plan.json"
    arguments = ["plan", "--cluster", CLUSTER, "--model", str(script), "-o", str(plan)]
    assert main([*arguments, "--strategy", "stock"]) == 0
    (finding,) = findings(plan, capsys)
    assert finding["where"] == "--train-iters --lr --data-path --tokenizer-type"
    assert finding["severity"] == "error"
    # What is missing may come at the launch.
    rest = [
        "--train-iters",
        "5",
        "--lr",
        "1e-4",
        "--mock-data",
        "--tokenizer-type",
        "NullTokenizer",
    ]
    assert findings(plan, capsys, "--", *rest) == []
    assert len(findings(plan, capsys, "--", *rest[:-1], "HuggingFaceTokenizer")) == 1
    main(["flags", str(plan)])
    assert (
        "# MISSING, the job cannot start without: --train-iters STEPS (" in capsys.readouterr().out
    )
    main(["launch", str(plan), "--for", "ssh", "-o", str(tmp_path / "job")])
    assert "the job cannot start without --train-iters" in " ".join(capsys.readouterr().err.split())
    text = script.read_text()
    assert text.count("# MISSING: ") == 4
    text = text.replace("# MISSING: ", "")
    script.write_text(text)
    assert main([*arguments, "--strategy", "stock"]) == 2  # STEPS is no number
    capsys.readouterr()
    for place, value in (("STEPS", "5"), ("RATE", "1e-4"), ("TYPE", "NullTokenizer")):
        text = text.replace(f" {place} ", f" {value} ")
    script.write_text(text)
    assert main([*arguments, "--strategy", "stock"]) == 0
    assert findings(plan, capsys) == []


def test_a_script_keeps_what_it_says(tmp_path: Path) -> None:
    """Every flag of the source is in the job, with its value, and the model is the same."""
    job, source = load_workload(job_of(tmp_path, "--model", SCRIPT)), load_workload(SCRIPT)
    assert (job.model, job.training) == (source.model, source.training)
    assert set(source.megatron_args) <= set(job.megatron_args)


def test_the_script_is_bash(tmp_path: Path) -> None:
    script = job_of(tmp_path, "--model", CONFIG, "--", *SIZES)
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert script.stat().st_mode & 0o100


def test_a_value_of_a_shell_is_missing(tmp_path: Path) -> None:
    source = tmp_path / "of-somebody.sh"
    text = Path(SCRIPT).read_text()
    source.write_text(text.replace("--lr ", "--lr $1 #", 1))
    lines = job_of(tmp_path, "--model", str(source)).read_text().splitlines()
    assert any(line.strip().startswith("# MISSING: --lr ") for line in lines)


def test_a_name_cannot_end_a_comment(tmp_path: Path) -> None:
    source = tmp_path / "a\nrm -rf x.flags"
    source.write_text((EXAMPLES / "budget" / "gpt-1.3b.flags").read_text())
    script = job_of(tmp_path, "--model", str(source)).read_text()
    assert "\nrm -rf" not in script


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--job"], "--job needs the model"),
        (["--job", "--node", "a=1xA100-40GB", "--model", CONFIG], "one at a time"),
        ([], "give --node, --from-slurm"),
        (["--node", "a=1xA100-40GB", "--model", CONFIG], "belong to --job"),
    ],
)
def test_contradictions(
    words: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", *words]) == 2
    assert says in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_only_evaluates_needs_no_learning_rate() -> None:
    assert [n.flags[0] for n in missing_flags({"--skip-train": ()})] == [
        "--data-path", "--tokenizer-type", "--eval-interval",
    ]  # fmt: skip
    whole = {flag: ("x",) for needed in NEEDED for flag in needed.flags}
    assert missing_flags(whole) == ()


def test_errors_name_the_file_that_is_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the script is written nobody can open it."""
    output = tmp_path / "train.sh"
    words = ["init", "--job", "--model", CONFIG, "-o", str(output)]
    assert main(words) == 4
    said = capsys.readouterr().err
    assert "config.json: --seq-length is missing" in said and "-- --seq-length N" in said
    assert "train.sh" not in said and not output.exists()
    config = json.loads(Path(CONFIG).read_text())
    bad = tmp_path / "config.json"
    bad.write_text(json.dumps({**config, "num_attention_heads": 31}, indent=1))
    assert main(["init", "--job", "--model", str(bad), "-o", str(output), "--", *SIZES]) == 4
    said = capsys.readouterr().err
    assert "config.json:" in said and "train.sh" not in said and not output.exists()


MOE = {
    "model_type": "qwen3_moe", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 4,
    "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
    "head_dim": 128, "max_position_embeddings": 4096, "vocab_size": 32000, "num_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 768, "norm_topk_prob": True,
    "output_router_logits": False,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "words", "line"),
    [
        ({"router_aux_loss_coef": 0.001}, [], "--moe-aux-loss-coeff 0.001"),
        ({"router_aux_loss_coef": 0.0}, [], "--moe-aux-loss-coeff 0.0"),
        ({}, [], "# MISSING: --moe-aux-loss-coeff WEIGHT"),
        ({}, ["--moe-router-load-balancing-type", "seq_aux_loss"], "# MISSING: --moe-aux-loss-coe"),
        ({}, ["--moe-aux-loss-coeff", "0.02"], "--moe-aux-loss-coeff 0.02"),
        ({}, ["--moe-router-load-balancing-type", "sinkhorn"], ""),
        ({}, ["--moe-router-load-balancing-type", "none"], ""),
        ({}, ["--moe-router-enable-expert-bias", "--moe-router-score-function", "sigmoid"], ""),
    ],
)
def test_a_balancing_loss_has_a_weight(
    keys: dict[str, float], words: list[str], line: str, tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MOE | keys))
    script = job_of(tmp_path, "--model", str(config), "--", *SIZES, *words)
    found = [text.strip() for text in script.read_text().splitlines() if "aux-loss-coe" in text]
    assert len(found) == bool(line) and all(text.startswith(line) for text in found)
    said = "though" if not line else "Hugging Face's own training adds only with"
    assert (said in script.read_text()) == (keys.get("router_aux_loss_coef", 0) > 0)
    subprocess.run(["bash", "-n", str(script)], check=True)
