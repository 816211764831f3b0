"""What of a running fleet stays, and what of its requests goes on."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.report.text.serving import change_lines
from megatron_hetero.serving.fleet.file import load_serving_plan
from megatron_hetero.serving.fleet.plan import Phase, PlannedReplica, PlannedStage, ServingPlan
from megatron_hetero.serving.prices.engine import EngineName
from megatron_hetero.serving.replan import compare_plans, part_going, replicas_left
from tests.serving.route.plans import two_replicas

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/serving"
CLUSTER = load_cluster(EXAMPLE / "cluster.yaml")


def _fleet(folder: Path, engine: EngineName, *phases: Phase) -> ServingPlan:
    """Return a fleet with a replica on each GPU of l40s-0, of a request per second each."""
    base = load_serving_plan(two_replicas(folder / "serve.json"))

    def replica(phase: Phase, gpu: int) -> PlannedReplica:
        stage = PlannedStage((f"l40s-0:{gpu}",), "l40s-0", "L40S", base.model.num_layers)
        return PlannedReplica(f"{phase}-{gpu}", phase, "L40S", (stage,), (1.0,), 1024, 16, 0.5)

    made = replace(base, engine=replace(base.engine, name=engine))
    return replace(made, replicas=tuple(replica(p, i) for i, p in enumerate(phases)))


def test_a_side_of_hand_overs_that_is_lost_takes_the_other_with_it(tmp_path: Path) -> None:
    plan = _fleet(tmp_path, "vllm", "prefill", "decode", "both")

    def left(*idle: str) -> float:
        return part_going(plan, replicas_left(plan, CLUSTER.without(idle)))

    assert left() == 1.0
    assert left("l40s-0:0") == left("l40s-0:1") == left("l40s-0:0", "l40s-0:1") == 0.5
    assert left("l40s-0:2") == 0.5
    # A whole machine may be idle, too.
    assert left("l40s-0") == 0.0


def test_a_fleet_that_is_lost_whole_has_a_comparison_for_programs_too(tmp_path: Path) -> None:
    """The gain was infinite, which is no JSON: a traceback."""
    plan = _fleet(tmp_path, "vllm", "both")
    change = compare_plans(plan, replace(plan, replicas=plan.replicas), 3600.0, old_scale=0.0)
    assert change.gain is None
    assert change.pays
    json.dumps(asdict(change), allow_nan=False)
    assert "serves nothing with the GPUs that are left" in change_lines(change)[1]


def test_a_replica_on_a_card_of_another_type_is_lost(tmp_path: Path) -> None:
    plan = _fleet(tmp_path, "vllm", "both")
    node = CLUSTER.node_by_name["l40s-0"]
    other = replace(node, gpu_type=CLUSTER.node_by_name["a100-0"].gpu_type)
    nodes = tuple(other if n is node else n for n in CLUSTER.nodes)
    assert replicas_left(plan, CLUSTER) == list(plan.replicas)
    assert not replicas_left(plan, replace(CLUSTER, nodes=nodes))


@pytest.mark.parametrize(
    ("engine", "before", "after", "number"),
    [
        ("vllm", ("prefill", "decode"), ("decode", "prefill"), 2),
        ("sglang", ("prefill", "decode"), ("decode", "prefill"), 0),
        ("vllm", ("both", "both"), ("prefill", "decode"), 0),
        ("vllm", ("both", "both"), ("both", "both"), 2),
    ],
)
def test_what_the_same_command_runs_stays(
    tmp_path: Path, engine: EngineName, before: tuple[Phase, ...], after: tuple[Phase, ...],
    number: int,
) -> None:  # fmt: skip
    old, new = _fleet(tmp_path, engine, *before), _fleet(tmp_path, engine, *after)
    assert len(compare_plans(old, new, 3600.0).stays) == number


def test_another_engine_starts_all_anew(tmp_path: Path) -> None:
    old, new = _fleet(tmp_path, "vllm", "both"), _fleet(tmp_path, "sglang", "both")
    change = compare_plans(old, new, 3600.0)
    assert (change.stays, change.starts, change.kept_part) == ((), ("both-0",), 0.0)
