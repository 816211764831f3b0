"""Plans of random machines with unlike cards: above their bound, and the same for equal inputs."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.bounds.free_groups import free_groups_bound_s
from megatron_hetero.cli.main import main
from megatron_hetero.cost.model import CostModel
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.file import save_plan
from megatron_hetero.planner import plan_cluster
from tests.planner.random_boxes import NUM_BOXES, write_box
from tools.prove_determinism import plan_bytes

FLAGS = (
    "--num-layers=6", "--hidden-size=1024", "--num-attention-heads=8", "--seq-length=512",
    "--max-position-embeddings=512", "--vocab-size=8000", "--micro-batch-size=1",
    "--global-batch-size=12", "--fp16",
)  # fmt: skip
QUICK = 1
"""Boxes that are planned in every run of the tests; the others in slow ones."""
SEEDS = [
    pytest.param(seed, marks=[] if seed < QUICK else [pytest.mark.slow])
    for seed in range(NUM_BOXES)
]


@pytest.mark.parametrize("seed", SEEDS)
def test_plans_of_boxes_are_equal_and_above_their_bound(seed: int, tmp_path: Path) -> None:
    """Two processes with unlike hash seeds, and cards in the order of the bus."""
    path, model = tmp_path / "box.yaml", tmp_path / "job.flags"
    cluster = write_box(seed, path)
    model.write_text(" ".join(FLAGS), encoding="utf-8")
    workload = load_workload(model)
    plan = plan_cluster(cluster, workload)
    save_plan(plan, tmp_path / "plan.json")
    assert plan_bytes(path, model, seed + 1, tmp_path) == (tmp_path / "plan.json").read_bytes()
    bound_s = free_groups_bound_s(CostModel(cluster, workload))
    assert plan.estimates is not None and bound_s is not None
    assert bound_s <= plan.estimates.step_time_s
    assert plan.estimates.bound_s is None or plan.estimates.bound_s <= plan.estimates.step_time_s


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUM_BOXES))
def test_plans_of_boxes_train_as_one_process_does(seed: int, tmp_path: Path) -> None:
    plan = plan_cluster(write_box(seed, tmp_path / "box.yaml"), load_workload(None, FLAGS))
    save_plan(plan, tmp_path / "plan.json")
    assert main(["verify", str(tmp_path / "plan.json"), "--steps", "2", "--optimizer", "adam"]) == 0
