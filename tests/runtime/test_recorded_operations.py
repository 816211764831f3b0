"""What ranks of real jobs give the library is what was proved, in the same order."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest

from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.lab.verify.small.text import VOCAB_SIZE
from megatron_hetero.schedule.proof.of_plan import How, job_operations
from megatron_hetero.schedule.proof.rules import blocked_ranks
from tests.runtime.plan_generator import cases
from tests.runtime.recorded_operations import compared, proved_steps, proved_workload, record
from tests.runtime.workloads import plan, workload

DIVIDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
FULL = How(full_buckets=True)
"""A bucket of a small model holds all gradients of its ranks."""


@pytest.mark.parametrize(
    ("layout", "flags"),
    [("tp2:3,tp1:1 @4 | tp1:4 @2", DIVIDED)],
)
def test_a_job_gives_what_was_proved(layout: str, flags: tuple[str, ...], tmp_path: Path) -> None:
    asked = workload()
    shrunk = shrink(plan(layout), asked)
    shrunk = replace(shrunk, plan_args=(*shrunk.plan_args, *flags))
    recorded = record(shrunk, tmp_path)
    model = replace(shrunk.model, vocab_size=VOCAB_SIZE, make_vocab_size_divisible_by=4)
    training = replace(
        asked.training,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    )
    proved = job_operations(shrunk.plan, replace(asked, model=model, training=training), FULL)
    assert compared(recorded, proved) == []
    assert blocked_ranks(recorded.job) == ()
    assert blocked_ranks(proved) == ()


@pytest.mark.slow
@pytest.mark.parametrize("number", range(12))
def test_generated_jobs_end_and_give_what_was_proved(number: int, tmp_path: Path) -> None:
    """Buckets that find no room start after the passes; each number of those that do is proved."""
    case = next(islice(cases(7), number, None))
    recorded = record(case.shrunk(case.plan), tmp_path, optimizer=case.optimizer)
    asked = proved_workload(case)
    orders = [how for how, _ in proved_steps(case.plan, asked, full=True)]
    assert any(not compared(recorded, job_operations(case.plan, asked, how)) for how in orders)
    assert blocked_ranks(recorded.job) == ()
    for how in (*orders, *(how for how, _ in proved_steps(case.plan, asked, full=False))):
        assert blocked_ranks(job_operations(case.plan, asked, how)) == ()
