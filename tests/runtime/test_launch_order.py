"""The order in which a stage runs forwards and backwards is the one that its launch count says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.workloads import plan, workload

NUM_MICRO_BATCHES = 7


@pytest.mark.parametrize("counts", [(None, None, None), (7, 4, 1), (3, 3, 3)])
def test_forwards_ahead_of_the_first_backward(
    counts: tuple[int | None, ...], tmp_path: Path
) -> None:
    asked = plan(f"tp1:2,tp1:1,tp1:1 @{NUM_MICRO_BATCHES}")
    stages = tuple(
        replace(stage, num_launched_forwards=count)
        for stage, count in zip(asked.replicas[0].stages, counts, strict=True)
    )
    # A second replica of another depth keeps 1F1B's own counts from being stock Megatron's plan.
    other = plan("tp1:4 @1").replicas[0]
    asked = replace(asked, replicas=(replace(asked.replicas[0], stages=stages), other))
    _run(asked, tmp_path)
    for stage, count in enumerate(counts):
        launched = 3 - stage if count is None else count
        expected = "F" * launched + "BF" * (NUM_MICRO_BATCHES - launched) + "B" * launched
        assert (tmp_path / f"order-{stage}").read_text() == expected


def test_chunks_in_turn(tmp_path: Path) -> None:
    """Two chunks on each of two stages, in the order that the plan has."""
    chunked = with_interleaving(plan("tp1:2,tp1:2 @4"), 0, [(0, 1), (1, 1), (0, 1), (1, 1)])
    orders = [stage.order for stage in chunked.replicas[0].stages]
    assert orders == ["FFF1F1FB1FB1F1BF1BB1B1BB", "FFF1B1F1B1FBFBF1B1F1B1BB"]
    _run(chunked, tmp_path)
    for stage, order in enumerate(orders):
        found = (tmp_path / f"order-{stage}").read_text()
        assert found == (order or "").replace("1", "")


def _run(asked: Plan, folder: Path) -> None:
    """Train a step; each rank writes the order of its steps to `folder`."""
    jobs = VerifyJobs(shrink(asked, workload()), Options(steps=1), folder)
    run_jobs([jobs.seed_job()], 120)
    path = folder / "plan.json"
    save_plan(asked, path)

    def train(rank: int) -> None:
        order = _record_order()
        argv = [*jobs.training_arguments("sgd"), f"--data-cache-path={folder / 'cache'}"]
        entry.main([*argv, f"--hetero-plan={path}"])
        (folder / f"order-{rank}").write_text("".join(order))

    run_jobs([LocalJob("order", asked.layout.num_devices, train, folder / "run")], 120)


def _record_order() -> list[str]:
    """Letters for Megatron's forward and backward steps, as they are called in this process."""
    from megatron.core.pipeline_parallel import schedules

    order: list[str] = []

    def recorded(letter: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            order.append(letter)
            return function(*args, **kwargs)

        return call

    schedules.forward_step = recorded("F", schedules.forward_step)
    schedules.backward_step = recorded("B", schedules.backward_step)
    return order
