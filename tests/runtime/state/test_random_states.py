"""Random states in checkpoints: the same plan goes on bit for bit, another one is seeded anew."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.state.random_states import current_states, replica_stages, set_states
from tests.runtime.flag_runs import plan_job, read_log
from tests.runtime.runs import train, whole_weights
from tests.runtime.workloads import plan, workload

FIRST = "tp2(2:1):3,tp1:1 @4 | tp1:4 @2"
SECOND = "tp1:1,tp2:3 @3 | tp1:4 @3"
SAVED_AT, LAST = 2, 4
DROPOUT = ("--hidden-dropout=0.2", "--attention-dropout=0.1")


def losses(ranks: list[RankRecord]) -> dict[int, float]:
    return {step: loss for record in ranks for step, loss in record.losses.items()}


def test_dropout_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    shrunk = shrink(plan(FIRST), workload(per_token_loss=True))
    jobs = VerifyJobs(replace(shrunk, plan=plan(FIRST)), Options(steps=LAST), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    # The start from the seed checkpoint keeps the states of the start: --finetune.
    from_seed = [*jobs.training_arguments("adam"), *DROPOUT]
    start = ("--load=", "--finetune", "--no-load-")
    folder = tmp_path / "checkpoints"
    resumed = [a for a in from_seed if not a.startswith(start)] + [f"--load={folder}"]
    one_more = [*resumed, f"--train-iters={SAVED_AT + 1}"]

    def log(name: str) -> str:
        return (tmp_path / name / "rank-0.log").read_text()

    saving = (f"--save={folder}", f"--save-interval={SAVED_AT}")
    whole = train(tmp_path / "whole", FIRST, [*from_seed, *saving])
    (folder / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    same = train(tmp_path / "same", FIRST, resumed)
    assert losses(same) == {step: losses(whole)[step] for step in (SAVED_AT + 1, LAST)}
    assert whole_weights(same, LAST) == whole_weights(whole, LAST)
    assert "no random states" not in log("same")

    # So the equality above is one of masks: without the states nothing is equal.
    other_masks = train(tmp_path / "other", FIRST, [*one_more, "--no-load-rng"])
    assert losses(other_masks)[SAVED_AT + 1] != losses(whole)[SAVED_AT + 1]
    assert whole_weights(other_masks, SAVED_AT) == whole_weights(whole, SAVED_AT)

    # The second replica has the same stages in both plans.
    another = train(tmp_path / "another", SECOND, one_more)
    assert "no random states for replica 0 of this plan" in log("another")
    assert whole_weights(another, SAVED_AT) == whole_weights(whole, SAVED_AT)
    assert losses(another)[SAVED_AT + 1] == pytest.approx(losses(whole)[SAVED_AT + 1], rel=0.05)


def test_a_pretrained_model_is_tuned_with_states_of_the_start(tmp_path: Path) -> None:
    """`--pretrained-checkpoint` is `--finetune` of that folder as long as --load has nothing."""
    folder = tmp_path / "saved"
    flags = ["--hidden-dropout=0.2", "--train-iters=2"]
    run_jobs([plan_job(tmp_path / "first", [*flags, f"--save={folder}", "--save-interval=2"])], 120)
    tuned = {
        "flag": ["--finetune", f"--load={folder}"],
        "folder": [f"--pretrained-checkpoint={folder}", "--load=nothing"],
    }
    jobs = [plan_job(tmp_path / name, [*flags, *more]) for name, more in tuned.items()]
    run_jobs(jobs, 120)
    by_flag, by_folder = (read_log(job).losses for job in jobs)
    assert len(by_flag) == 2
    assert by_folder == by_flag


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ("tp2:3,tp1:1 @4", "tp2:3,tp1:1 @7x2", True),
        ("tp2:3,tp1:1 @4", "tp2(2:1):3,tp1:1 @4", False),
        ("tp2:3,tp1:1 @4", "tp2:2,tp1:2 @4", False),
    ],
)
def test_places_are_those_of_the_stages(first: str, second: str, is_equal: bool) -> None:
    plans: list[Plan] = [plan(first), plan(second)]
    assert (replica_stages(plans[0]) == replica_stages(plans[1])) is is_equal


def test_every_state_comes_back(tmp_path: Path) -> None:
    def draw() -> list[float]:
        from megatron.core.tensor_parallel import get_cuda_rng_tracker

        with get_cuda_rng_tracker().fork():
            forked = torch.rand(3)
        numbers = [random.gauss(0, 1), numpy.random.normal(), float(torch.rand(1))]
        return [*numbers, *forked.tolist()]

    def check(rank: int) -> None:
        backend.activate_cpu_backend()
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(7, tp_rank=0, ep_rank=0, etp_rank=0)
        # An odd number of normal draws, so that Python and numpy each keep one for later.
        draw()
        states = current_states()
        first = draw()
        assert draw() != first
        set_states(states)
        assert draw() == first

    run_jobs([LocalJob("states", 1, check, tmp_path)], 60)
