"""Our flags, and the plan that they ask for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.errors import PlanFormatError, UsageError
from megatron_hetero.runtime.job.arguments import requested_plan, split_arguments

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


def test_a_missing_plan_file_is_named(tmp_path: Path) -> None:
    from megatron_hetero.errors import FileFormatError

    with pytest.raises(FileFormatError, match=r"nowhere\.json"):
        requested_plan(split_arguments(["--hetero-plan", str(tmp_path / "nowhere.json")]))
