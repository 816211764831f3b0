"""`--step-batch-size-schedule`: growing batches, divided as the plan divides its own."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.batches import batch_schedule, with_micro_batch_sizes
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.model.samples.data import Order, ReplicaSampler
from tests.runtime.flag_effects import EXPERTS
from tests.runtime.flag_runs import plan_and_one
from tests.runtime.runs import train
from tests.runtime.workloads import plan, workload

FIRST = "tp2:3,tp1:1 @4 | tp1:4 @2"
SECOND = "tp1:1,tp2:3 @2 | tp1:4 @4"


def sized(layout: str) -> Plan:
    return with_micro_batch_sizes(plan(layout), 1)


def test_it_trains_and_resumes_as_one_process(tmp_path: Path) -> None:
    """Batches of 3, 3, 6, 6; Megatron saves where they grow, and another plan goes on there."""
    common = shrink(plan(FIRST), workload(per_token_loss=True))
    jobs = VerifyJobs(replace(common, plan=plan(FIRST)), Options(steps=4), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    growing = (f"--step-batch-size-schedule=0:3 {6 * common.model.seq_length}:6",)
    fixed = ("--train-iters", "--global-batch-size", "--load", "--finetune", "--no-load-")
    base = [a for a in jobs.training_arguments("adam") if not a.startswith(fixed)]
    # So that the learning rate, too, depends on how many samples have been seen.
    base += [*growing, "--train-samples=18", "--lr-decay-style=linear", "--lr-decay-samples=30"]
    seed = (f"--load={tmp_path / 'seed'}", "--finetune", "--no-load-optim", "--no-load-rng")
    saved = tmp_path / "saved"

    def vocabulary(layout: str) -> str:
        widths = plan(layout).layout.tensor_parallel_widths
        return f"--make-vocab-size-divisible-by={common.vocab_multiple // lcm(*widths)}"

    one = train(
        tmp_path / "one",
        None,
        [
            *base,
            *seed,
            *backend.CPU_FLAGS,
            f"--make-vocab-size-divisible-by={common.vocab_multiple}",
        ],
    )
    ours = train(
        tmp_path / "ours",
        FIRST,
        [*base, *seed, vocabulary(FIRST), f"--save={saved}", "--save-interval=1000"],
    )
    assert losses(one).keys() == {1, 2, 3, 4}
    assert losses(ours) == pytest.approx(losses(one), rel=1e-6)
    assert norms(ours) == pytest.approx(norms(one), rel=2e-6)

    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    resumed = train(tmp_path / "resumed", SECOND, [*base, vocabulary(SECOND), f"--load={saved}"])
    assert losses(resumed) == pytest.approx({s: losses(one)[s] for s in (3, 4)}, rel=1e-6)
    assert norms(resumed) == pytest.approx({s: norms(one)[s] for s in (3, 4)}, rel=2e-6)


@pytest.mark.parametrize(
    "validation",
    ["--eval-global-batch-size=6", "--eval-global-batch-size=12 --eval-micro-batch-size=2"],
)
def test_the_log_of_a_small_batch_is_that_of_one_process(validation: str, tmp_path: Path) -> None:
    """Routing losses are means over the micro-batches of the step, and validation has its own
    batch."""
    flags = [
        *EXPERTS, "--moe-z-loss-coeff=0.01", "--train-samples=12", *validation.split(),
        "--step-batch-size-schedule=0:3 96:6", "--eval-iters=1", "--eval-interval=2",
    ]  # fmt: skip
    ours, one = plan_and_one(tmp_path, flags)
    for pattern in (r"load_balancing_loss: (\S+) ", r"z_loss: (\S+) ", r"loss value: (\S+) "):
        assert len(ours.numbers(pattern)) >= 3, pattern
        assert ours.numbers(pattern) == pytest.approx(one.numbers(pattern), rel=3e-6)


def losses(ranks: list[RankRecord]) -> dict[int, float]:
    return {step: loss for record in ranks for step, loss in record.losses.items()}


def norms(ranks: list[RankRecord]) -> dict[int, float]:
    return {step: float.fromhex(norm) for step, norm in ranks[0].norms.items()}


def test_samples_follow_each_other_where_the_batch_grows() -> None:
    batches = batch_schedule("0:3,60:6", 10, sized(FIRST))
    read = [list(ReplicaSampler(batches, r, Order(19), 0)) for r in range(2)]
    # Of 3 samples the first replica has two; of 19 the last one fills no batch.
    assert read[0] == [[0], [2], [3], [5], [6], [8], [10], [11], [12], [14], [16], [17]]
    assert sorted(s for part in read for batch in part for s in batch) == list(range(18))
    # Resumed in the middle.
    assert list(ReplicaSampler(batches, 0, Order(19), 3)) == read[0][2:]
