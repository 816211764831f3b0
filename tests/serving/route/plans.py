"""A serving plan of two replicas, for tests."""

from __future__ import annotations

from pathlib import Path

from megatron_hetero.serving.fleet.file import save_serving_plan
from megatron_hetero.serving.fleet.plan import (
    EngineSettings,
    PlannedClass,
    PlannedReplica,
    PlannedStage,
    ServedAs,
    ServingPlan,
)


def two_replicas(path: Path) -> Path:
    """Write a plan whose replica `a` gets two of three requests, and `b` the third."""
    stages = (
        PlannedStage(("m:0", "m:1"), "m", "A100-80GB", 3),
        PlannedStage(("n:0",), "n", "T4-16GB", 1),
    )
    whole = (PlannedStage(("m:2",), "m", "A100-80GB", 4),)
    plan = ServingPlan(
        goal="throughput",
        engine=EngineSettings("any", 0.9, 16, 512),
        model=ServedAs("tiny", 4, "16-bit", "16-bit", 1e6),
        classes=(PlannedClass("all", 3.0, 10.0, 8.0, None, None),),
        replicas=(
            PlannedReplica("a", "both", "m+n", stages, (2.0,), 1024, 16, 0.5),
            PlannedReplica("b", "both", "m", whole, (1.0,), 1024, 16, 0.5),
        ),
        scale=1.0,
        bound=1.0,
        gap=0.0,
        utilization=0.5,
        cost_per_hour=None,
        budget_per_hour=None,
        forecast=None,
        any_engine=None,
        made_by="tests",
    )
    save_serving_plan(plan, path)
    return path
