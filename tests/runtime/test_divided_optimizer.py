"""`--use-distributed-optimizer`: the optimizer's state divided among unlike replicas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.utils import get_model_config

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.runtime.gradients.sync import gradient_sync
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.model import gpt
from tests.runtime.runs import checkpoint_tensors
from tests.runtime.test_daily_life import number
from tests.runtime.workloads import LLAMA_LIKE, plan, workload

CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "unlike depth": ("tp2:3,tp1:1 @4 | tp1:4 @2", {"per_token_loss": True}, ()),
    "unlike uneven shares": (
        "tp3(2:1:1):2,tp2(1:3):2 @3 | tp2:4 @2",
        {**LLAMA_LIKE, "sequence_parallel": True},
        ("--overlap-grad-reduce", "--no-align-grad-reduce", "--overlap-param-gather"),
    ),
}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [
        # Generated plans of the default tests have it, with each kind of exchange.
        pytest.param("unlike uneven shares", "adam", marks=pytest.mark.slow),
        pytest.param("unlike uneven shares", "sgd", marks=pytest.mark.slow),
        pytest.param("unlike depth", "adam", marks=pytest.mark.slow),
        pytest.param("unlike depth", "sgd", marks=pytest.mark.slow),
    ],
)
def test_a_divided_optimizer_trains_as_one_process(
    name: str, optimizer: str, tmp_path: Path
) -> None:
    layout, changes, flags = CASES[name]
    flags = ("--use-distributed-optimizer", *flags)
    options = Options(steps=2, optimizers=(optimizer,), plan_flags=flags)
    outcome = verify(plan(layout), workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)


def test_weights_travel_while_the_forward_pass_runs(tmp_path: Path) -> None:
    """The same losses and weights as without; nobody reads weights in between, as a record does."""
    layout = "tp2:4 @3 | tp1:2,tp1:2 @2"
    shrunk = shrink(plan(layout), workload(**LLAMA_LIKE))
    jobs = VerifyJobs(shrunk, Options(steps=3), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    flags = ("--use-distributed-optimizer", "--overlap-grad-reduce")
    results = []
    for name, more in (("apart", ()), ("overlapped", ("--overlap-param-gather",))):
        folder = tmp_path / name
        argv = [
            *jobs.training_arguments("adam"),
            *flags,
            *more,
            f"--hetero-layout={layout}",
            f"--save={folder / 'saved'}",
            "--save-interval=1000",
            f"--data-cache-path={folder / 'cache'}",
        ]

        def train(rank: int, argv: list[str] = argv, folder: Path = folder) -> None:
            save_without_a_server()
            forward_step, under_way = gpt.forward_step, []

            def watched(data_iterator: Any, model: Any) -> Any:
                sync = gradient_sync(get_model_config(model))
                assert sync is not None
                under_way.append(sync.weights.num_under_way)
                return forward_step(data_iterator, model)

            gpt.forward_step = watched
            entry.main(argv)
            (folder / f"under-way-{rank}").write_text(json.dumps(under_way))

        run_jobs([LocalJob(name, shrunk.plan.layout.num_devices, train, folder)], 120)
        losses = number((folder / "rank-3.log").read_text().splitlines(), r"lm loss: (\S+) ")
        waiting = [json.loads((folder / f"under-way-{rank}").read_text()) for rank in range(4)]
        results.append((losses, checkpoint_tensors(folder / "saved" / "iter_0000003"), waiting))
    (apart, weights, none), (overlapped, same, some) = results
    assert len(apart) == 3
    assert overlapped == apart
    assert weights.keys() == same.keys()
    assert all(torch.equal(weights[key], same[key]) for key in weights)
    assert not any(any(counts) for counts in none)
    # Three micro-batches a step on the first replica, two on the second: before the first one of
    # every step but the first some weights are still to come, and after it none.
    for rank, counts in enumerate(some):
        per_step = 3 if rank < 2 else 2
        steps = [counts[i : i + per_step] for i in range(0, len(counts), per_step)]
        assert [step[0] > 0 for step in steps] == [False, True, True]
        assert not any(any(step[1:]) for step in steps)


def test_a_gpu_of_more_memory_keeps_more_of_the_state(tmp_path: Path) -> None:
    """The wide replica keeps a quarter, the other three; the training is the same."""
    asked = plan("tp2:4 @2 | tp1:4 @2")
    wide, single = asked.replicas
    stages = (replace(single.stages[0], optimizer_share=3),)
    asked = replace(asked, replicas=(wide, replace(single, stages=stages)))
    options = Options(steps=2, optimizers=("adam",), plan_flags=("--use-distributed-optimizer",))
    outcome = verify(asked, workload(), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
    log = (tmp_path / "adam" / "plan" / "rank-0.log").read_text()
    (line,) = [line for line in log.splitlines() if line.startswith("> optimizer state")]
    low, high = [int(word[:-1]) for word in line.split() if word.endswith("%")][:2]
    assert low in range(22, 27) and high in range(72, 77), line
