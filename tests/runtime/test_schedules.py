"""Schedules other than 1F1B train as one process does, number for number."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.errors import UnsupportedError
from megatron_hetero.lab.kit.orders import with_chunks, with_interleaving, with_zero_bubble
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import read_record
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.checks import support
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.schedule.of_plan import with_schedule
from megatron_hetero.schedule.orders.list_schedule import TimedPipeline
from megatron_hetero.schedule.orders.synthesise import synthesise
from megatron_hetero.schedule.parts import ChunkTimes
from tests.runtime.test_daily_life import number, run
from tests.runtime.workloads import LLAMA_LIKE, plan, workload

INTERLEAVED: dict[str, tuple[str, list[tuple[int, int]], dict[str, Any]]] = {
    "two chunks each": (
        "tp2:3,tp1:3 @4",
        [(0, 1), (1, 2), (0, 2), (1, 1)],
        {"num_layers": 6, "sequence_parallel": True},
    ),
    "unlike numbers of chunks": (
        "tp1:2,tp2:2,tp1:3 @6 | tp1:7 @1",
        [(0, 2), (1, 1), (2, 1), (1, 1), (2, 2)],
        {"num_layers": 7, **LLAMA_LIKE, "per_token_loss": True},
    ),
}


_SLOW = {"two chunks each", "two replicas", "tied"}
"""Parts of what other cases have, or the generated plans of `test_pairs`."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in INTERLEAVED]
)
def test_interleaved_stages_train_as_one_process(name: str, tmp_path: Path) -> None:
    layout, layers, changes = INTERLEAVED[name]
    _verify(with_interleaving(plan(layout), 0, layers), tmp_path, changes)


ZERO_BUBBLE: dict[str, tuple[str, list[int], dict[str, Any]]] = {
    "tied": ("tp2:2,tp1:2 @6", [4, 2], {"sequence_parallel": True}),
    "two replicas": (
        "tp1:1,tp2:1,tp1:2 @5 | tp1:4 @2",
        [5, 4, 3],
        {**LLAMA_LIKE, "per_token_loss": True},
    ),
    "recompute, ZeRO-1": (
        "tp2:3,tp1:1 @4 | tp1:4 @1",
        [3, 2],
        {"recompute": "full", "add_qkv_bias": True, "use_distributed_optimizer": True},
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in ZERO_BUBBLE]
)
def test_split_backward_passes_train_as_one_process(name: str, tmp_path: Path) -> None:
    layout, limits, changes = ZERO_BUBBLE[name]
    asked = with_zero_bubble(plan(layout), 0, limits)
    assert all("I" in (s.order or "") for s in asked.replicas[0].stages)
    _verify(asked, tmp_path, changes)


def test_split_backward_passes_add_up_the_same_bits(tmp_path: Path) -> None:
    """Weight gradients made later are added in the order of micro-batches all the same."""
    whole = plan("tp2:2,tp1:2 @5")
    split = with_zero_bubble(whole, 0, [4, 3])
    runs = []
    for name, asked in (("whole", whole), ("split", split)):
        shrunk = shrink(asked, workload(tied_embeddings=False, sequence_parallel=True))
        jobs = VerifyJobs(shrunk, Options(steps=2), tmp_path / name)
        run_jobs([jobs.seed_job()], 120)
        job = jobs.plan_job("sgd")
        run_jobs([job], 120)
        runs.append([read_record(job.directory / f"record-{rank}") for rank in range(3)])
    for one, other in zip(*runs, strict=True):
        assert one.losses == other.losses
        assert one.norms == other.norms
        assert one.arrays.keys() == other.arrays.keys()
        for key, array in one.arrays.items():
            assert array.tobytes() == other.arrays[key].tobytes(), key


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"transformer_impl": "transformer_engine"}, "--transformer-impl: use local"),
        ({"overlap_grad_reduce": True}, "--overlap-grad-reduce: leave it out"),
    ],
)
def test_what_does_not_go_with_split_passes_is_refused(flags: dict[str, Any], says: str) -> None:
    asked = plan("tp2:2,tp1:2 @5")
    args = SimpleNamespace(**{"transformer_impl": "local", "overlap_grad_reduce": False, **flags})
    support.check_orders(asked, args)
    with pytest.raises(UnsupportedError, match=says):
        support.check_orders(with_zero_bubble(asked, 0, [4, 3]), args)


def test_a_computed_schedule_of_chunks_trains_as_one_process(tmp_path: Path) -> None:
    """Unlike chunks, split backward passes, slow hops: what the search finds runs."""
    chunked = with_chunks(plan("tp1:3,tp2:3 @4"), 0, [(0, 1), (1, 2), (0, 2), (1, 1)])
    times = (
        (ChunkTimes(1.0, 1.0, 1.0), ChunkTimes(2.0, 2.0, 2.0)),
        (ChunkTimes(1.2, 1.2, 1.2), ChunkTimes(0.6, 0.6, 0.6)),
    )
    hops = (BoundaryTime(0.5, 1.0),) * 3
    found = synthesise(TimedPipeline((0, 1, 0, 1), 4, times, hops, hops), [6, 6])
    asked = with_schedule(chunked, 0, found.schedule, "synthesised")
    assert all("I" in (stage.order or "") for stage in asked.replicas[0].stages)
    _verify(asked, tmp_path, {"num_layers": 6, "sequence_parallel": True})


def test_validation_runs_the_forwards_of_the_schedule(tmp_path: Path) -> None:
    """Chunks of unlike number: the log of training and validation is that of plain stages."""
    layers = [(0, 1), (1, 1), (2, 1), (1, 1), (2, 1)]
    plain = plan("tp1:1,tp2:2,tp1:2 @6 | tp1:5 @1")
    chunked = with_interleaving(plain, 0, layers)
    jobs = VerifyJobs(shrink(chunked, workload(num_layers=5)), Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    argv = [a for a in jobs.training_arguments("sgd") if not a.startswith(("--eval-", "--split"))]
    argv += ["--split=8,1,1", "--eval-iters=1", "--eval-interval=1"]
    logs = []
    for name, asked in (("plain", plain), ("chunked", chunked)):
        save_plan(asked, tmp_path / f"{name}.json")
        flag = f"--hetero-plan={tmp_path / f'{name}.json'}"
        logs.append(run(tmp_path / name, 5, [*argv, flag]))
    for pattern in (r"lm loss: (\S+) ", r"lm loss value: (\S+) ", r"grad norm: (\S+) "):
        one, other = (number(lines, pattern) for lines in logs)
        assert len(one) >= 2
        assert one == pytest.approx(other, rel=2e-6)


def _verify(asked: Plan, folder: Path, changes: dict[str, Any]) -> None:
    validate_plan(asked)
    options = Options(steps=2, optimizers=("sgd",))
    outcome = verify(asked, workload(**changes), options, folder)
    assert outcome.ok, outcome_to_data(outcome)
