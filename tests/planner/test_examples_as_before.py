"""Cluster files from before machines could have unlike cards: no plan is slower than it was.

Layouts are those of commit 3614b8f, the last one that had a node for each machine; their seconds
are by today's prices.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import canonical_hosts, plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.planner import plan_cluster
from megatron_hetero.schedule.estimate import estimate_plan

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
BEFORE: dict[str, tuple[Any, ...]] = {
    "one-odd-gpu/cluster.yaml": (
        "gpt-1.3b.flags",
        "tp1:6,tp1:6,tp1:2,tp1:6,tp1:4 @48x2",
    ),
    "rtx3080-rtx4090/cluster.yaml": (
        "gpt-1.3b.sh",
        "tp1:10,tp1:4,tp1:3,tp1:7 @32x2",
    ),
    "three-gpus/cluster.yaml": ("config.json", "tp1:11,tp1:12,tp1:5 @32x2"),
    "a100-rtx4090/cluster.yaml": (
        "gpt-7b.sh",
        "tp1:5,tp1:5,tp1:13,tp1:5,tp1:4 @32",
    ),
    "lost-node/after.yaml": (
        "gpt-6.7b.flags",
        "tp1:7,tp1:8,tp1:8,tp1:3,tp1:6 @48",
    ),
    # The wide stage has a machine of its own, and the stages beside it share one.
    "lost-node/before.yaml": (
        "gpt-6.7b.flags",
        "tp1:6,tp1:6,tp1:6,tp2:10,tp1:4 @48",
        ("a:0",),
        ("a:1",),
        ("b:0",),
        ("c:0", "c:1"),
        ("b:1",),
    ),
}
OF_CONFIG = (
    "--micro-batch-size=1", "--global-batch-size=64", "--bf16", "--seq-length=2048",
)  # fmt: skip
"""Flags of the job whose model is a config.json, which names none."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", BEFORE)
def test_no_plan_of_an_old_cluster_file_is_slower_than_it_was(name: str) -> None:
    model, layout, *devices = BEFORE[name]
    path = EXAMPLES / name
    flags = OF_CONFIG if model == "config.json" else ()
    cluster, workload = load_cluster(path), load_workload(path.parent / model, flags)
    plan = plan_cluster(cluster, workload)
    assert plan.estimates is not None
    before = plan_from_layout(parse_layout(layout), workload)
    if devices:
        (replica,) = before.replicas
        stages = [replace(s, devices=d) for s, d in zip(replica.stages, devices, strict=True)]
        replicas = (replace(replica, stages=tuple(stages)),)
        before = replace(before, replicas=replicas, hosts=canonical_hosts(replicas, cluster))
    steps = []
    # Else the layout on the machines in every order in which each stage stays on equal GPUs of one.
    for nodes in permutations(cluster.nodes):
        with suppress(PlanFormatError):
            placed = place_in_order(before, replace(cluster, nodes=nodes))
            steps.append(estimate_plan(placed, cluster).step_time_s)
    assert plan.estimates.step_time_s <= min(steps) * (1 + 1e-9)
