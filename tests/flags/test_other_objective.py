"""Another micro-batch size than the job's, where that is another objective."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.flags.other_objective import other_objective
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tests.cost.builders import make_workload


def of(layout: str, *flags: str, per_token_loss: bool = False, size: int = 1) -> str | None:
    made = make_workload()
    training = replace(made.training, per_token_loss=per_token_loss, micro_batch_size=size)
    plan: Plan = plan_from_layout(parse_layout(layout))
    return other_objective(
        replace(plan, workload=replace(made, training=training, megatron_args=flags))
    )


@pytest.mark.parametrize("layout", ["tp1:4 @8", "tp1:4 @8x1"])
def test_the_jobs_own_size_is_no_other_objective(layout: str) -> None:
    assert of(layout, "--eod-mask-loss") is None


def test_another_size_is_one_unless_losses_are_per_token() -> None:
    assert "where you mask losses" in str(of("tp1:4 @4x2"))
    found = str(of("tp1:4 @4x2", "--eod-mask-loss"))
    assert "micro-batches of 2 sequences, the job says 1: --eod-mask-loss masks" in found
    assert of("tp1:4 @4x2", "--eod-mask-loss", per_token_loss=True) is None
    assert "micro-batches of 1 sequence, the job says 2" in str(of("tp1:4 @8x1", size=2))
