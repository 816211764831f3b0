"""Steps of a pipeline in any order: the gradients of one process, added up alike, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_hetero.lab.kit.orders import with_zero_bubble
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.steps.executor import Executor
from megatron_hetero.schedule.of_plan import replica_schedule
from tests.runtime.steps.small_pipeline import SmallRank, in_one_process, losses
from tests.runtime.toy_model import in_world
from tests.runtime.workloads import plan

LAYOUT = "tp1:1,tp1:1,tp1:1 @5"


def launching(*counts: int) -> Plan:
    """1F1B with so many forwards ahead on each stage."""
    asked = plan(LAYOUT)
    stages = tuple(
        replace(stage, num_launched_forwards=count)
        for stage, count in zip(asked.replicas[0].stages, counts, strict=True)
    )
    return replace(asked, replicas=(replace(asked.replicas[0], stages=stages),))


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    """In 1F1B with its own and with other launch counts, and with backward passes in two parts."""
    split = [with_zero_bubble(plan(LAYOUT), 0, limits) for limits in ([3, 3, 3], [5, 4, 2])]
    orders = (plan(LAYOUT), launching(5, 5, 5), launching(5, 3, 2), *split)

    def check(rank: int) -> None:
        for asked in orders:
            own = SmallRank(asked, rank)
            executor = Executor(replica_schedule(asked, 0), own.stage)
            expected = in_one_process(3, 5)[own.stage].weight.main_grad
            for _ in range(2):  # the second finds nothing of the first
                reports = own.step(executor, 5)
                assert torch.equal(own.model.weight.main_grad, expected)
                own.model.weight.main_grad.zero_()
                found = [float(report["loss"]) for report in reports]
                assert found == pytest.approx(losses(3, 5) if own.stage == 2 else [], rel=1e-14)

    in_world(LAYOUT, check, tmp_path)
