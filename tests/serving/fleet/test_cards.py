"""Which cards of a cluster serve, and which of them together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.serving.checks import check_fleet
from megatron_hetero.serving.fleet.api import planned_fleet
from megatron_hetero.serving.fleet.offers import make_fleet
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.served import load_served
from megatron_hetero.serving.workload.load import load_request_mix

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving"
SERVED = load_served(EXAMPLE, "16-bit", "16-bit")
MIX = load_request_mix(EXAMPLE / "workload.yaml")


@pytest.fixture(scope="module")
def of_two_makers(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    path = tmp_path_factory.mktemp("makers") / "cluster.yaml"
    link = "{bandwidth: 240 GB/s, latency: 5 us}"
    types = ("MI300X", "H100-80GB", "RTX-3090")
    nodes = "".join(f"  - {{name: n{i}, gpu: {t}, count: 2}}\n" for i, t in enumerate(types))
    path.write_text(
        f"version: 1\nnodes:\n{nodes}links:\n  inside_node: {{"
        + ", ".join(f"{t}: {link}" for t in types)
        + "}\n  between_nodes: {bandwidth: 400 Gb/s, latency: 10 us}\n"
    )
    return load_cluster(path)


def test_no_pipeline_and_no_hand_over_joins_two_makers(of_two_makers: Cluster) -> None:
    fleet = make_fleet(of_two_makers, SERVED, ENGINES["vllm"], MIX)
    apart = set()
    for offered in fleet.offered.values():
        libraries = {stage.gpu.library for stage in offered.shape.pipeline.stages}
        assert len(libraries) == 1
        apart |= libraries if offered.phase != "both" else set()
    assert apart == {"NCCL"}


def test_the_order_of_the_machines_does_not_change_the_choices(of_two_makers: Cluster) -> None:
    turned = replace(of_two_makers, nodes=of_two_makers.nodes[::-1])
    names, other = (
        sorted(make_fleet(cluster, SERVED, ENGINES["vllm"], MIX).offered)
        for cluster in (of_two_makers, turned)
    )
    assert names == other
    assert any(name.find("H100") < name.find("3090") for name in names if "H100" in name)
    assert any(0 < name.find("3090") < name.find("H100") for name in names)


def test_limits_of_makers_and_prices_hold(of_two_makers: Cluster) -> None:
    limits = replace(of_two_makers.limits, library="RCCL")
    plan, *_ = planned_fleet(replace(of_two_makers, limits=limits), SERVED, MIX)
    assert {s.gpu for r in plan.replicas for s in r.stages} == {"MI300X"}
    priced = load_cluster(EXAMPLE / "cluster.yaml")
    limits = replace(priced.limits, max_price_per_hour=8.0)
    priced = replace(priced, nodes=priced.nodes[1:3], limits=limits)
    plan, *_ = planned_fleet(priced, SERVED, MIX, budget_per_hour=20.0)
    assert plan.cost_per_hour is not None
    assert plan.cost_per_hour <= 8.0 == plan.budget_per_hour


def test_a_fleet_with_an_fp8_cache_passes_its_own_check(of_two_makers: Cluster) -> None:
    served = load_served(EXAMPLE, "16-bit", "fp8")
    plan, *_ = planned_fleet(of_two_makers, served, MIX)
    assert "RTX-3090" not in {s.gpu for r in plan.replicas for s in r.stages}
    assert all(f.severity != "error" for f in check_fleet(plan, of_two_makers))
