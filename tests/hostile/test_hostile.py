"""A twentieth of what `tools/fuzz.py` gives by default, with a new seed in every run.

`MEGATRON_HETERO_FUZZ_SEED=N` repeats a run; every fault names its seed.
"""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.errors import FileFormatError, HeteroError, UsageError
from megatron_hetero.flags.emit import check_user_flags, megatron_args
from tests.hostile.mutate import word
from tests.hostile.plans import damaged_faults, layout_faults
from tests.hostile.readers import READERS, Reader, fault, fuzz
from tests.hostile.watch import watched
from tests.hostile.words import entry_faults, script_faults, word_faults
from tests.plan.edits import PLAN

SEED = int(os.environ.get("MEGATRON_HETERO_FUZZ_SEED") or secrets.randbits(48))
ROOT = Path(__file__).resolve().parents[2]
NUM_TEXTS, NUM_WORDS, NUM_PLANS = 2_000, 3_000, 500


@pytest.mark.parametrize("reader", READERS, ids=str)
def test_a_reader_takes_any_text_or_refuses_it_by_name(reader: Reader, tmp_path: Path) -> None:
    assert reader.sound
    found = list(fuzz(reader, tmp_path, NUM_TEXTS // len(READERS), SEED))
    assert not found, f"seed {SEED}: {found[0][0]!r}: {found[0][1]}"


def test_hostile_words_stay_words() -> None:
    chance = random.Random(SEED)
    for _ in range(NUM_WORDS):
        assert not list(word_faults(word(chance))), f"seed {SEED}"


def test_hostile_flags_stay_flags_in_a_script() -> None:
    chance = random.Random(SEED)
    for _ in range(100):
        value = word(chance).replace("\x00", "")
        assert not list(script_faults(PLAN, ("--save", value))), f"seed {SEED}"
        assert not list(entry_faults(value)), f"seed {SEED}"


def test_random_plans_are_read_as_they_were_or_refused() -> None:
    chance = random.Random(SEED)
    for _ in range(NUM_PLANS // 2):
        assert not list(layout_faults(chance)), f"seed {SEED}"
        assert not list(damaged_faults(chance)), f"seed {SEED}"


@pytest.mark.parametrize(
    "flags",
    [
        ("--spec", "os", "system"),
        ("--yaml-cfg", "x"),
        ("--fp8-quantizer-factory", "os.system"),
        ("--fp4-quantizer-factory=os.system",),
        ("--trust-remote-code",),
    ],
)
def test_a_plan_carries_no_flag_that_runs_code(flags: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="a plan may not carry it"):
        check_user_flags(flags)
    assert PLAN.workload is not None
    given = replace(PLAN.workload, megatron_args=(*PLAN.workload.megatron_args, *flags))
    with pytest.raises(HeteroError):
        megatron_args(replace(PLAN, workload=given), "plan.json")


def test_the_watch_sees_what_it_forbids(tmp_path: Path) -> None:
    """A reader that runs, writes, reads elsewhere or never ends is found."""

    def bad(path: Path) -> None:
        subprocess.run(["true"], check=True)

    def writer(path: Path) -> None:
        path.with_name("pwned").write_text("")

    def elsewhere(path: Path) -> None:
        (ROOT / "README.md").read_text()

    def crash(path: Path) -> None:
        raise KeyError("x")

    def silent(path: Path) -> None:
        raise FileFormatError("")

    path = tmp_path / "f"
    path.write_text("x")
    words = {bad: "subprocess.Popen", writer: "pwned", elsewhere: "README.md", crash: "KeyError",
             silent: "without a word"}  # fmt: skip
    for read, expected in words.items():
        found = fault(Reader("it", "f", read, ["x"]), path)
        assert found is not None and expected in found
    assert fault(Reader("it", "f", lambda p: p.read_text(), ["x"]), path) is None
    with watched(tmp_path) as seen:
        pass
    assert seen == []


# What the tool has found, each as it was; `docs/SECURITY.md` lists them.
FOUND = (
    ("driver's list", "0, NVIDIA A100, 0, 8.9, 00000000:01:00.0, Disabled, 4, 4, 16, Disabled"),
    ("driver's list", f"0, A, {'9' * 5000}, 8.9, 00000000:01:00.0, Disabled, 4, 4, 16, Disabled"),
    ("topology", "\tGPU0\tGPU1\nGPU7 X NV1\nGPU8 NV1 X"),
    ("shell script", "torchrun pretrain_gpt.py --num-layers " + '"$(' * 1500 + ')"' * 1500),
    ("shell script", "torchrun pretrain_gpt.py --num-layers " + "${a:-" * 1500 + "}" * 1500),
    ("flag file", "--num-layers 1000000000 --hidden-size 64 --num-attention-heads 4 --seq-length 8"
     " --max-position-embeddings 8 --vocab-size 10 --micro-batch-size 1"),
)  # fmt: skip


@pytest.mark.parametrize(("title", "text"), FOUND, ids=lambda text: text[:20])
def test_what_was_found_is_refused(title: str, text: str, tmp_path: Path) -> None:
    (reader,) = (r for r in READERS if r.title == title)
    path = tmp_path / reader.name
    path.write_text(text)
    with pytest.raises(HeteroError):
        reader.read(path)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [("        1024", "9" * 5000), ("        1024", "9" * 400), ("      0 ", "      ² ")],
)
def test_numbers_of_a_log_are_bounded(was: str, becomes: str, tmp_path: Path) -> None:
    (reader,) = (r for r in READERS if r.title == "nccl-tests log")
    path = tmp_path / reader.name
    assert was in reader.sound[0]
    path.write_text(reader.sound[0].replace(was, becomes))
    assert fault(reader, path) is None


def test_the_tool_repeats_a_seed_and_counts() -> None:
    tool = [sys.executable, str(ROOT / "tools/fuzz.py"), "--strings=40", "--plans=4", "--seed=3"]
    done = subprocess.run(tool, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "seed 3" in done.stdout and "0 faults" in done.stdout
