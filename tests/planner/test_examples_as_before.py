"""Cluster files from before machines could have unlike cards: no plan is slower than it was.

Layouts and steps are those of commit 3614b8f, the last one that had a node for each machine.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.planner import plan_cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BEFORE = {
    "one-odd-gpu/cluster.yaml": (
        "gpt-1.3b.flags",
        "tp1:6,tp1:6,tp1:2,tp1:6,tp1:4 @48x2",
        4.1092621755639795,
    ),
    "rtx3080-rtx4090/cluster.yaml": (
        "gpt-1.3b.sh",
        "tp1:10,tp1:4,tp1:3,tp1:7 @32x2",
        2.197663299024942,
    ),
    "three-gpus/cluster.yaml": ("config.json", "tp1:11,tp1:12,tp1:5 @32x2", 8.914605467950661),
    "a100-rtx4090/cluster.yaml": (
        "gpt-7b.sh",
        "tp1:5,tp1:5,tp1:13,tp1:5,tp1:4 @32",
        11.247915977515989,
    ),
    "lost-node/after.yaml": (
        "gpt-6.7b.flags",
        "tp1:7,tp1:8,tp1:8,tp1:3,tp1:6 @48",
        5.129150721441955,
    ),
    "lost-node/before.yaml": (
        "gpt-6.7b.flags",
        "tp1:6,tp1:6,tp1:6,tp2:10,tp1:4 @48",
        3.816634769279036,
    ),
}
OF_CONFIG = (
    "--micro-batch-size=1", "--global-batch-size=64", "--bf16", "--seq-length=2048",
)  # fmt: skip
"""Flags of the job whose model is a config.json, which names none."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BEFORE)
def test_old_cluster_files_give_the_plan_that_they_gave_or_a_faster_one(name: str) -> None:
    model, layout, step_s = BEFORE[name]
    path = EXAMPLES / name
    flags = OF_CONFIG if model == "config.json" else ()
    plan = plan_cluster(load_cluster(path), load_workload(path.parent / model, flags))
    assert plan.estimates is not None
    assert plan.estimates.step_time_s <= step_s * (1 + 1e-9)
    is_same_step = plan.estimates.step_time_s >= step_s * (1 - 1e-9)
    assert not is_same_step or format_layout(plan.layout) == layout
