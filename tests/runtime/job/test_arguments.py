"""Our flags, and what Megatron's parser sees on each rank."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megatron_hetero.errors import PlanFormatError, UsageError
from megatron_hetero.plan.ranks import positions
from megatron_hetero.runtime.job.arguments import (
    rank_arguments,
    requested_plan,
    split_arguments,
    virtual_world,
)
from tests.runtime.workloads import plan

LAYOUT = "tp2:3,tp1:1 @4 | tp3:4 @2"


def test_our_flags_are_taken_out() -> None:
    arguments = split_arguments(["--num-layers", "4", "--hetero-layout", LAYOUT, "--bf16"])
    assert arguments.layout == LAYOUT
    assert arguments.megatron == ("--num-layers", "4", "--bf16")
    assert arguments.init == "layout-independent"


def test_a_plan_and_a_layout_are_one_too_many() -> None:
    with pytest.raises(UsageError, match="--hetero-plan or --hetero-layout, not both"):
        split_arguments(["--hetero-layout", LAYOUT, "--hetero-plan", "plan.json"])


@pytest.mark.parametrize(
    "flag",
    [
        "--tensor-model-parallel-size=4",
        "--pipeline-model-parallel-size=2",
        "--pipeline-model-parallel-layout=Et|tL",
        "--num-virtual-stages-per-pipeline-rank=2",
        "--global-batch-size=7",
    ],
)
def test_a_flag_that_contradicts_the_plan_is_refused_by_name(flag: str) -> None:
    argv = ["--hetero-layout", LAYOUT, "--micro-batch-size=1", flag]
    with pytest.raises(UsageError, match=flag.partition("=")[0]):
        requested_plan(split_arguments(argv))


def test_a_layout_that_misses_a_layer_is_refused() -> None:
    with pytest.raises(PlanFormatError, match="layer"):
        requested_plan(split_arguments(["--hetero-layout", "tp2:3 @4 | tp1:4 @2"]))


def test_every_rank_pads_the_vocabulary_alike() -> None:
    """Megatron pads to the divisor times the width; all ranks must get one number."""
    asked = plan(LAYOUT)
    for given, divisor in (((), 128), (("--make-vocab-size-divisible-by", "10"), 10)):
        products = set()
        for position in positions(asked.layout):
            argv = rank_arguments(asked, position, given)
            width = asked.replicas[position.replica].stages[position.stage].shape.tensor_parallel
            last = [a for a in argv if a.startswith("--make-vocab-size-divisible-by=")][-1]
            products.add(int(last.partition("=")[2]) * width)
        assert products == {divisor * 6}


def test_a_rank_parses_as_if_its_replica_were_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = plan(LAYOUT)
    position = positions(asked.layout)[2]
    argv = rank_arguments(asked, position, ("--bf16",))
    assert "--tensor-model-parallel-size=1" in argv
    assert "--pipeline-model-parallel-size=2" in argv
    assert "--pipeline-model-parallel-layout=Ettt|tL" in argv
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "6")
    before = sys.argv
    with virtual_world(asked, position, argv):
        assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
        assert sys.argv[1:] == list(argv)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("2", "6")
    assert sys.argv is before


def test_a_missing_plan_file_is_named(tmp_path: Path) -> None:
    from megatron_hetero.errors import FileFormatError

    with pytest.raises(FileFormatError, match=r"nowhere\.json"):
        requested_plan(split_arguments(["--hetero-plan", str(tmp_path / "nowhere.json")]))
