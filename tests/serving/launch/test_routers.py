"""Routers of fleets with prefill apart, and ports."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import PlanFormatError
from megatron_hetero.serving.checks import check_fleet
from megatron_hetero.serving.fleet.file import load_serving_plan
from megatron_hetero.serving.fleet.plan import (
    HandOver,
    Phase,
    PlannedReplica,
    PlannedStage,
    ServingPlan,
    check_plan,
)
from megatron_hetero.serving.launch.folder import fleet_files
from megatron_hetero.serving.prices.engine import EngineName
from tests.serving.route.plans import two_replicas


@pytest.fixture
def plan(tmp_path: Path) -> ServingPlan:
    """Return a fleet of two places that prefill and decode, each for itself."""
    base = load_serving_plan(two_replicas(tmp_path / "serve.json"))

    def replica(phase: Phase, place: str, gpu: int) -> PlannedReplica:
        stage = PlannedStage((f"{place}:{gpu}",), place, "H100-80GB", base.model.num_layers)
        return PlannedReplica(f"{phase}-{place}", phase, place, (stage,), (1.0,), 1024, 16, 0.5)

    sides: tuple[Phase, ...] = ("prefill", "decode")
    return replace(
        base,
        replicas=tuple(replica(phase, p, i) for p in "xy" for i, phase in enumerate(sides)),
        hand_overs=(HandOver("x", "x", (1.0,)), HandOver("y", "y", (1.0,))),
    )


def _files(plan: ServingPlan, engine: EngineName) -> dict[str, str]:
    made = replace(plan, engine=replace(plan.engine, name=engine))
    check_plan(made)
    return {file.name: file.text for file in fleet_files(made, engine)[0]}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_each_part_that_hands_over_inside_alone_has_a_router(
    plan: ServingPlan, engine: EngineName
) -> None:
    files = _files(plan, engine)
    first, second = (
        files[f"router-prefill-decode{number}.sh"] for number in ("", "-2")
    )  # fmt: skip
    assert "http://x:8100" in first
    assert "http://x:8101" in first
    assert "http://y" not in first
    assert "http://y:8103" in second
    assert "http://x" not in second
    assert first.count("8001") == second.count("8002") == 1
    assert files["START.txt"].count("router: ") == 2
    told = json.loads(files["routes.json"])["hand_overs"]
    assert [(t["prefill"], t["decode"]) for t in told] == [
        (["prefill-x"], ["decode-x"]), (["prefill-y"], ["decode-y"]),
    ]  # fmt: skip


def test_parts_that_a_hand_over_joins_have_one_router(plan: ServingPlan) -> None:
    joined = replace(plan, hand_overs=(*plan.hand_overs, HandOver("x", "y", (0.1,))))
    for made in (joined, replace(plan, hand_overs=())):
        names = [name for name in _files(made, "vllm") if name.startswith("router")]
        assert names == ["router-prefill-decode.sh"]


def test_doctor_names_slow_links_that_hand_overs_may_take_alone(
    plan: ServingPlan, tmp_path: Path
) -> None:
    link = "{bandwidth: 400 GB/s, latency: 3 us}"
    (tmp_path / "cluster.yaml").write_text(
        "version: 1\nnodes:\n  - {name: x, gpu: H100-80GB, count: 2}\n"
        "  - {name: y, gpu: H100-80GB, count: 2}\n"
        f"links:\n  inside_node: {{H100-80GB: {link}}}\n"
        "  between_nodes: {bandwidth: 1 Gb/s, latency: 1 ms}\n"
    )
    cluster = load_cluster(tmp_path / "cluster.yaml")
    joined = replace(plan, hand_overs=(*plan.hand_overs, HandOver("x", "y", (0.1,))))
    for made, number in ((plan, 0), (joined, 1), (replace(plan, hand_overs=()), 1)):
        assert [f.id for f in check_fleet(made, cluster)].count("serve-kv-link") == number


def test_a_hand_over_between_replicas_that_are_not_there_is_refused(plan: ServingPlan) -> None:
    for pair in (HandOver("x", "z", (1.0,)), HandOver("x", "y", (1.0, 1.0))):
        with pytest.raises(PlanFormatError, match="hand_overs"):
            check_plan(replace(plan, hand_overs=(pair,)))


def test_ranks_of_sglang_on_one_machine_listen_on_ports_of_their_own(plan: ServingPlan) -> None:
    """Ranks above 0 answer questions after their health; they would find the port taken."""
    gpus = (("x", 0), ("x", 1), ("y", 0), ("y", 1))
    stages = tuple(PlannedStage((f"{h}:{i}",), h, "H100-80GB", 1) for h, i in gpus)
    one = replace(plan.replicas[0], name="one", phase="both", stages=stages)
    other = replace(one, name="two", stages=tuple(
        replace(s, devices=(f"{s.host}:{i + 2}",)) for s, (_, i) in zip(stages, gpus, strict=True)
    ))  # fmt: skip
    files = _files(
        replace(
            plan, replicas=(one, other), hand_overs=(), model=replace(plan.model, num_layers=4)
        ),
        "sglang",
    )
    listening = [
        (text.split("--host ")[1].split()[0], text.split("--port ")[1].split()[0])
        for text in files.values()
        if "sglang.launch_server" in text
    ]
    assert len(listening) == len(set(listening)) == 8
    assert "http://x:8100 http://x:8101" in files["router.sh"]
