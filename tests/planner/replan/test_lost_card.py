"""A machine with unlike cards loses one: the others go on, each with what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.holdings import StateSizes, held_bytes, holdings, parts_of_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.replan.replanning import replan
from tests.cost.builders import make_workload
from tests.planner.replan.test_replanning import check

WORKLOAD = make_workload(num_layers=6, hidden_size=2048, global_batch_size=24)
CARDS = "{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}"


def box(folder: Path, cards: str = CARDS, limits: str = "{}") -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(
        f"version: 1\nnodes: [{{name: box, gpus: [{cards}], "
        f"link: {{bandwidth: 12 GB/s, latency: 15 us}}}}]\nlimits: {limits}\n",
        encoding="utf-8",
    )
    return load_cluster(path)


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The plan of the whole box, which uses all of its cards."""
    plan = plan_cluster(box(tmp_path_factory.mktemp("box")), WORKLOAD)
    assert set(plan.type_by_device) == {"box:0", "box:1", "box:2"}
    return plan


@pytest.mark.parametrize("lost", ["box:0", "box:1", "box:2"])
def test_the_others_keep_their_places_and_what_they_hold(
    lost: str, old: Plan, tmp_path: Path
) -> None:
    cluster = box(tmp_path, limits=f'{{idle: ["{lost}"]}}')
    found = replan(old, cluster)
    check(found, cluster)
    for way in found.ways:
        assert lost not in way.plan.type_by_device
        assert way.movement.moved_bytes < _all_bytes(way.plan), "something stays where it was"


def test_a_card_that_took_the_place_of_another_type_keeps_nothing(
    old: Plan, tmp_path: Path
) -> None:
    """Without the RTX 4090 the bus numbers an RTX 3090 as card 0, and that is no RTX 4090."""
    cluster = box(tmp_path, "{type: RTX-3090, count: 2}")
    found = replan(old, cluster)
    check(found, cluster)
    for way in found.ways:
        kept = holdings(WORKLOAD, parts_of_plan(way.plan)).get("box:0", {})
        assert way.movement.moved_bytes >= held_bytes(StateSizes(WORKLOAD), kept) * (1 - 1e-9)


def _all_bytes(plan: Plan) -> float:
    kept = holdings(WORKLOAD, parts_of_plan(plan))
    return sum(held_bytes(StateSizes(WORKLOAD), own) for own in kept.values())
