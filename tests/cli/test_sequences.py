"""`plan --sequences`."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cli.sequences import window_of_all_layers
from megatron_hetero.errors import UnsupportedError, UsageError
from tools.drawn_lengths import lengths_of, written_lengths

CLUSTER = Path(__file__).parents[2] / "examples" / "a100-rtx4090" / "cluster.yaml"
_JOB = (
    "--num-layers 12 --hidden-size 1024 --num-attention-heads 16 --swiglu --seq-length 4096 "
    "--position-embedding-type rope --max-position-embeddings 524288 --vocab-size 32000 "
    "--tokenizer-type NullTokenizer --micro-batch-size 1 --global-batch-size 24 --bf16 "
    "--use-flash-attn --use-distributed-optimizer --attention-dropout 0 --hidden-dropout 0 "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
FLAGS = _JOB.split()


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text(written_lengths(lengths_of([700] * 80 + [5000] * 15 + [120_000] * 5, "made")))
    return path


def plan(lengths: Path, *words: str) -> int:
    return main(["plan", "--cluster", str(CLUSTER), "--sequences", str(lengths), *words, "--",
                 *FLAGS])  # fmt: skip


def test_flexible_groups_are_planned_beside_fixed_degrees(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "step.svg"
    assert plan(lengths, "--json", "--picture", str(picture)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lengths"] == {
        "num_sequences": 100, "median": 700, "longest": 120_000, "part_below_8192": 0.95,
    }  # fmt: skip
    assert found["advice"] == "flexible" and found["gain"] > 1.02
    assert found["gain"] == pytest.approx(found["fixed"][0]["step_s"] / found["flexible_step_s"])
    # What is dealt is what training runs; other exchanges stand beside it.
    assert found["any_exchange_step_s"] < found["flexible_step_s"]
    exchanges = {
        g["exchange"] for s in found["steps"] for m in s["micro_batches"] for g in m["groups"]
    }
    assert {"all-to-all", "alone"} <= exchanges and not any("ring" in e for e in exchanges)
    for step in found["steps"]:
        assert sum(len(g["tokens"]) for m in step["micro_batches"] for g in m["groups"]) == 24
        assert step["bound_s"] <= step["seconds"] * (1 + 1e-9)
    shapes = ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    titles = [t.text or "" for t in shapes.iter("{http://www.w3.org/2000/svg}title")]
    drawn = [int(t.split()[0].replace(",", "")) for t in titles if "tokens on ranks" in t]
    first = [
        k for m in found["steps"][0]["micro_batches"] for g in m["groups"] for k in g["tokens"]
    ]
    assert set(drawn) <= set(first) and max(drawn) == max(first)


def test_a_table_for_people_says_that_it_is_simulated(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(lengths) == 0
    out = capsys.readouterr().out
    assert "flexible" in out and "all of 5" in out and "Simulated from the catalogue" in out


@pytest.mark.parametrize(
    ("text", "words", "code", "message"),
    [
        ("90000000", [], 3, "the longest sequence of .* has 90,000,000 tokens"),
        ("12 x", [], 4, "is not a length in tokens"),
        ("500", ["--prove"], 2, "--prove does not go with it"),
        ("500", ["-o", "plan.json"], 2, "--output does not go with it"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    text: str,
    words: list[str],
    code: int,
    message: str,
) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text(text)
    assert plan(path, *words) == code
    assert re.search(message, " ".join(capsys.readouterr().err.split()))


def test_a_window_is_read_from_the_jobs_flags() -> None:
    assert window_of_all_layers(FLAGS) is None
    assert window_of_all_layers([*FLAGS, "--window-size", "1023,0"]) == 1024
    assert window_of_all_layers([*FLAGS, "--window-size=(127,0)"]) == 128
    assert window_of_all_layers([*FLAGS, "--window-size", "-1,0"]) is None
    with pytest.raises(UsageError, match="two numbers"):
        window_of_all_layers([*FLAGS, "--window-size", "1024"])
    with pytest.raises(UnsupportedError, match="skip-freq"):
        window_of_all_layers([*FLAGS, "--window-size", "1023,0", "--window-attn-skip-freq", "2"])


def test_a_picture_needs_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--cluster", str(CLUSTER), "--picture", "a.svg", "--", *FLAGS]) == 2
    assert "--sequences LENGTHS.TXT" in capsys.readouterr().err


def test_sequences_beyond_the_learned_positions_are_named(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Training refuses them, so that advice to train with them needs a word."""
    learned = ["--position-embedding-type", "learned_absolute", "--max-position-embeddings"]
    command = ["plan", "--cluster", str(CLUSTER), "--sequences", str(lengths), "--", *FLAGS]
    assert main([*command, *learned, "4096"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "120,000 tokens, and the model learns 4,096 positions: training refuses it" in said
    assert main([*command, *learned, "120000"]) == 0
    assert "training refuses" not in capsys.readouterr().err
