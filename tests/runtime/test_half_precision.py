"""bf16 and fp16: the plan is as near to one process as that one is to fp32; one loss scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import read_record
from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.lab.verify.run import outcome_to_data, records, verify
from megatron_hetero.lab.verify.small.shrink import Shrunk, shrink
from megatron_hetero.runtime.gradients.memory import main_grad
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from tests.runtime.flag_runs import one_process_job, plan_job, read_log
from tests.runtime.workloads import LLAMA_LIKE, plan, workload

LAYOUT = "tp2:3,tp1:1 @4 | tp1:4 @2"
UNEVEN = "tp3(2:1:1):3,tp2(3:1):1 @4 | tp1:4 @2"


@pytest.mark.parametrize(
    ("precision", "layout", "changes"),
    [
        ("fp16", LAYOUT, {"per_token_loss": True}),
        pytest.param(
            *("fp16", UNEVEN, {**LLAMA_LIKE, "sequence_parallel": True}), marks=pytest.mark.slow
        ),
        ("bf16", LAYOUT, {"use_distributed_optimizer": True}),
    ],
)
def test_a_plan_rounds_no_worse_than_one_process(
    precision: Any, layout: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    options = Options(steps=3, precision=precision, optimizers=("adam",))
    outcome = verify(plan(layout), workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
    comparison = outcome.comparisons["adam"]
    assert comparison.floor is not None
    assert 1e-7 < comparison.bounds.loss < 1e-2
    assert 1e-4 < comparison.floor.gradients.value < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "flag"),
    [("bf16", "--grad-reduce-in-bf16"), ("fp16", "--accumulate-allreduce-grads-in-fp32")],
)
def test_gradients_are_added_up_in_the_other_precision(
    precision: Any, flag: str, tmp_path: Path
) -> None:
    asked = workload(per_token_loss=True, precision=precision)
    job = replace(asked, megatron_args=(f"--{precision}", flag))
    options = Options(precision=precision, optimizers=("adam",))
    outcome = verify(plan(LAYOUT), job, options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
    assert flag in outcome.flags.kept


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["boundary-slice-dropped", "slice-not-reduced", "sample-moved"])
def test_planted_errors_are_larger_than_rounding(fault: str, tmp_path: Path) -> None:
    options = Options(precision="fp16", optimizers=("sgd",), steps=3, fault=fault)
    assert not verify(plan(LAYOUT), workload(per_token_loss=True), options, tmp_path).ok


def test_steps_are_skipped_and_scales_resumed_as_by_one_process(tmp_path: Path) -> None:
    """The scale overflows at first; the run goes through a checkpoint, on to another plan."""
    scale = "--initial-loss-scale=1024"
    first = _scaled(plan(LAYOUT), scale)
    second = _scaled(plan("tp1:2,tp2:2 @6"), scale)
    jobs = VerifyJobs(first, Options(steps=6, precision="fp16"), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    before, after = jobs.interrupted_jobs("adam", second, 3)
    run_jobs([before, jobs.reference_job("adam")], 120)
    run_jobs([after], 120)
    (one,) = records(jobs.reference_job("adam"))
    # The scale grows after two good steps, one on each side of the checkpoint.
    assert one.skipped == (2, 5)
    assert one.loss_scales == {1: 1024, 2: 1024, 3: 512, 4: 512, 5: 1024, 6: 512}
    for job, steps in ((before, range(1, 4)), (after, range(4, 7))):
        for record in records(job):
            assert record.loss_scales == {step: one.loss_scales[step] for step in steps}
            assert record.skipped == tuple(step for step in one.skipped if step in steps)


@pytest.mark.parametrize(
    "flags", [pytest.param((), marks=pytest.mark.slow), ("--use-distributed-optimizer",)]
)
def test_an_overflow_on_one_rank_makes_all_skip(flags: tuple[str, ...], tmp_path: Path) -> None:
    asked = plan(LAYOUT)
    shrunk = _scaled(asked, "--initial-loss-scale=16")
    jobs = VerifyJobs(shrunk, Options(steps=3, precision="fp16", plan_flags=flags), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    folder = tmp_path / "planted"
    argv = (
        *jobs.training_arguments("adam"),
        *flags,
        f"--hetero-layout={LAYOUT}",
        f"--data-cache-path={folder}",
    )

    def train(rank: int) -> None:
        save_without_a_server()
        recorder = _Overflow(rank == 2, at_step=2)
        entry.main(argv, recorder)
        recorder.save(folder / f"record-{rank}")

    run_jobs([LocalJob("planted", asked.layout.num_devices, train, folder)], 120)
    for rank in range(asked.layout.num_devices):
        record = read_record(folder / f"record-{rank}")
        assert record.skipped == (2,)
        assert record.loss_scales == {1: 16.0, 2: 16.0, 3: 8.0}
        weights = [key.split("/", 2)[2] for key in record.arrays if key.startswith("weight/1/")]
        assert any("linear" in name for name in weights)
        for name in weights:
            one, two, three = (record.arrays[f"weight/{step}/{name}"] for step in (1, 2, 3))
            assert (one == two).all()
            if "linear" in name and name.endswith("weight"):
                assert (two != three).any()


class _Overflow(Recorder):
    """Fault on the rank where it `is_planted`: one gradient of one step is infinite before the
    sync."""

    def __init__(self, is_planted: bool, at_step: int) -> None:
        super().__init__()
        self._is_planted, self._at_step = is_planted, at_step

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        from megatron.core.utils import get_model_config
        from megatron.training import get_args

        config = get_model_config(model[0])
        inner: Callable[..., Any] = config.finalize_model_grads_func

        def finalize(*args: Any, **kwargs: Any) -> None:
            if self._is_planted and get_args().curr_iteration + 1 == self._at_step:
                main_grad(next(model[0].parameters())).view(-1)[0] = float("inf")
            inner(*args, **kwargs)

        config.finalize_model_grads_func = finalize
        return super().post_wrap_hook(model)


def _scaled(asked: Any, *flags: str) -> Shrunk:
    shrunk = shrink(asked, workload(per_token_loss=True))
    return replace(shrunk, model_args=(*shrunk.model_args, *flags))


@pytest.mark.slow
def test_residuals_in_fp32(tmp_path: Path) -> None:
    """`--fp32-residual-connection`: other numbers, no farther from those of one process than four
    times its own distance from fp32."""
    half = ["--bf16", "--normalization=RMSNorm"]
    flags = [*half, "--fp32-residual-connection"]
    jobs = [
        plan_job(tmp_path / "plan", flags),
        *(one_process_job(tmp_path / n, f) for n, f in (("one", flags), ("half", half))),
        one_process_job(tmp_path / "fp32", half[1:]),
    ]
    run_jobs(jobs, 120)
    ours, one, plain, exact = (np.array(read_log(job).losses) for job in jobs)
    bound = 4 * np.abs(one - exact).max()
    assert len(ours) == 3 and np.abs(ours - one).max() <= bound < 0.01
    assert (one != plain).any()
