"""fp8 on a CPU: scales and the groups that agree on them, and plans beside one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.runtime.transformer_engine.fp8_ranks import casts, divided_beside_whole
from tests.runtime.transformer_engine.proofs import tried
from tests.runtime.transformer_engine.with_layers import TRANSFORMER_ENGINE, call

FP8 = ("--bf16", "--fp8-format=hybrid")


@pytest.mark.parametrize(
    "num_ranks, recipe",
    [
        (2, "tensorwise"),
        pytest.param(3, "tensorwise", marks=pytest.mark.slow),
        pytest.param(2, "delayed", marks=pytest.mark.slow),
        pytest.param(3, "delayed", marks=pytest.mark.slow),
    ],
)
def test_ranks_scale_as_one_process_does(num_ranks: int, recipe: str, tmp_path: Path) -> None:
    same_out, same_weight, far = call(
        TRANSFORMER_ENGINE, divided_beside_whole, num_ranks, recipe, True, str(tmp_path)
    )
    assert same_out and same_weight
    # Ranks add their parts of the input's gradient in bf16.
    assert far < num_ranks * 2**-8


def test_casts_are_those_of_the_compiled_part() -> None:
    found = call(TRANSFORMER_ENGINE, casts)
    assert len(found) == 14 and [name for name, holds in found.items() if not holds] == []


@pytest.mark.slow
def test_ranks_that_do_not_agree_on_a_scale_are_seen(tmp_path: Path) -> None:
    same_out, *_ = call(
        TRANSFORMER_ENGINE, divided_beside_whole, 2, "tensorwise", False, str(tmp_path)
    )
    assert not same_out


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags, said",
    [
        ((*FP8, "--fp8-recipe=tensorwise", "--sequence-parallel"), "equal"),
        ((*FP8, "--fp8-recipe=delayed"), "UnsupportedError: .*--fp8-recipe"),
        ((*FP8, "--fp8-recipe=blockwise"), "UnsupportedError: .*--fp8-recipe"),
    ],
)
def test_plans_in_fp8(flags: tuple[str, ...], said: str) -> None:
    import re

    assert re.search(said, call(TRANSFORMER_ENGINE, tried, list(flags)), re.DOTALL)
