"""The bound of groups of any cards holds on random machines with unlike cards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from megatron_hetero.bounds.free_groups import free_groups_bound_s
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.model.load import load_workload
from tests.planner.random_boxes import NUM_BOXES, write_box

FLAGS = (
    "--num-layers=8", "--hidden-size=1024", "--num-attention-heads=8", "--seq-length=512",
    "--max-position-embeddings=512", "--vocab-size=8000", "--micro-batch-size=1",
    "--global-batch-size=24", "--fp16",
)  # fmt: skip
NUM_PLACEMENTS = 12


def random_placement(cluster: Cluster, random: Random) -> Placement:
    """All cards in groups of one to three in random shares, and groups in one to three pipelines,
    fast cards with as much as slow ones."""
    cards = random.sample(cluster.devices, len(cluster.devices))
    groups = []
    while cards:
        width = random.randint(1, min(3, len(cards)))
        groups.append([cards.pop() for _ in range(width)])
    number = random.randint(1, min(3, len(groups)))
    pipelines = [groups[i::number] for i in range(number)]
    return Placement(tuple(_replica(groups, 24 // number, random) for groups in pipelines))


def _replica(groups: Sequence[Sequence[Device]], count: int, random: Random) -> PlacedReplica:
    cuts = sorted(random.sample(range(1, 8), len(groups) - 1))
    layers = [b - a for a, b in zip([0, *cuts], [*cuts, 8], strict=True)]
    return PlacedReplica(
        tuple(
            PlacedStage(
                tuple(group),
                number,
                tuple(random.randint(1, 6) for _ in group) if len(group) > 1 else None,
            )
            for group, number in zip(groups, layers, strict=True)
        ),
        count,
    )


@pytest.mark.parametrize("seed", range(NUM_BOXES))
def test_no_plan_of_a_box_beats_the_bound(seed: int, tmp_path: Path) -> None:
    cluster, random = write_box(seed, tmp_path / "box.yaml"), Random(seed)
    workload = load_workload(None, FLAGS)
    costs = CostModel(cluster, workload)
    bound_s = free_groups_bound_s(costs)
    assert bound_s is not None and bound_s > 0
    for _ in range(NUM_PLACEMENTS):
        placement = random_placement(cluster, random)
        for recompute in ("none", "full"):
            replicas = [
                replace(r, stages=tuple(replace(s, recompute=recompute) for s in r.stages))
                for r in placement.replicas
            ]
            cost = costs.placement(Placement(tuple(replicas)))
            assert bound_s <= cost.step_time_s
