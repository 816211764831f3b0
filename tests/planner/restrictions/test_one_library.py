"""Clusters of several makers: planned for one of them, refused where that cannot be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_hetero.cli.main import main
from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.errors import InfeasiblePlanError, LibraryError, PlanFormatError
from megatron_hetero.flags.launch import node_launches
from megatron_hetero.plan.checks.validate import validate_plan
from megatron_hetero.plan.communication.libraries import library_of
from megatron_hetero.plan.file import plan_from_data, plan_to_data, save_plan
from megatron_hetero.planner import plan_and_explain, plan_cluster
from megatron_hetero.planner.advise.explain import explain_plan
from megatron_hetero.planner.advise.what_if import what_to_add
from megatron_hetero.planner.objective import Objective
from megatron_hetero.planner.portfolio import strategies_of
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.schedule.estimate import estimate_plan
from tests.cost.builders import GIB, make_cluster, make_workload
from tests.preflight.jobs import with_width

AMD, NVIDIA = gpu_type("MI300X"), gpu_type("H100-80GB")
GAUDI = replace(NVIDIA, name="Gaudi-2", library="HCCL")
TWO_MAKERS = (("amd", AMD, 2), ("nv", NVIDIA, 3))
WORKLOAD = make_workload(num_layers=4, hidden_size=1024, global_batch_size=4)


def test_the_best_plan_of_one_maker_is_taken_and_says_what_the_others_would_do() -> None:
    cluster = make_cluster(*TWO_MAKERS)
    plan, _ = plan_and_explain(cluster, WORKLOAD)
    alone = {
        name: plan_cluster(make_cluster(node), WORKLOAD)
        for name, node in zip(("RCCL", "NCCL"), TWO_MAKERS, strict=True)
    }
    steps = {name: p.estimates.step_time_s for name, p in alone.items() if p.estimates}
    best = min(steps, key=steps.__getitem__)
    assert plan.estimates is not None and plan.estimates.step_time_s == steps[best]
    assert {library_of(host) for host in plan.hosts} == {best}
    assert plan.estimates.bound_s == alone[best].estimates.bound_s  # of what can be used
    other = next(node for node, gpu, _ in TWO_MAKERS if gpu.library != best)
    reasons = {r for d, r in plan.idle_reasons.items() if d.startswith(other)}
    (reason,) = reasons
    assert "speaks" in reason and "alone takes" in reason
    assert plan == plan_cluster(cluster, WORKLOAD)
    validate_plan(plan, cluster)
    # Priced again, it has the same bound: no plan could have the other maker's GPUs beside its own.
    assert estimate_plan(plan, cluster).bound_s == plan.estimates.bound_s
    explained = explain_plan(plan, cluster, strategies=strategies_of("columns"))
    assert explained.best_stock is not None
    assert what_to_add(plan, cluster, num_planned=1).additions


def test_other_objectives_choose_among_makers_too() -> None:
    amd, nv = make_cluster(*TWO_MAKERS).nodes
    dear, cheap = replace(amd, gpu_price_per_hour=40.0), replace(nv, gpu_price_per_hour=0.1)
    cluster = replace(make_cluster(*TWO_MAKERS), nodes=(dear, cheap))
    plan, _ = plan_and_explain(cluster, WORKLOAD, objective=Objective("cheapest"))
    assert {host.node for host in plan.hosts} == {"nv"}
    turned = replace(cluster, nodes=(replace(amd, gpu_price_per_hour=0.1),
                                     replace(nv, gpu_price_per_hour=40.0)))  # fmt: skip
    plan, _ = plan_and_explain(turned, WORKLOAD, objective=Objective("cheapest"))
    assert {host.node for host in plan.hosts} == {"amd"}


def test_a_maker_with_too_few_gpus_leaves_it_to_the_other() -> None:
    small = replace(AMD, memory_bytes=1 << 20)
    plan = plan_cluster(make_cluster(("amd", small, 4), ("nv", NVIDIA, 1)), WORKLOAD)
    assert [host.node for host in plan.hosts] == ["nv"]
    assert "no plan on them alone fits" in plan.idle_reasons["amd:0"]
    tiny = replace(NVIDIA, memory_bytes=1 << 20)
    with pytest.raises(InfeasiblePlanError, match=r"(?s)with RCCL: No plan.*with NCCL: No plan"):
        plan_cluster(make_cluster(("amd", small, 1), ("nv", tiny, 1)), WORKLOAD)


def test_the_limit_decides_and_is_kept_by_validate() -> None:
    limits = Limits(library="NCCL", memory_reserve_bytes=GIB)
    cluster = make_cluster(*TWO_MAKERS, limits=limits)
    plan = plan_cluster(cluster, WORKLOAD)
    assert {library_of(host) for host in plan.hosts} == {"NCCL"}
    assert plan.idle_reasons["amd:0"] == "MI300X speaks RCCL, and the plan's GPUs NCCL"
    other = replace(cluster, limits=replace(limits, library="RCCL"))
    with pytest.raises(PlanFormatError, match="keep to GPUs with RCCL"):
        validate_plan(plan, other)


def test_gpus_on_which_nothing_trains_are_idle_or_refused() -> None:
    plan = plan_cluster(make_cluster(("gaudi", GAUDI, 8), ("nv", NVIDIA, 2)), WORKLOAD)
    assert [host.node for host in plan.hosts] == ["nv"]
    assert 'is "hpu" or "npu" to torch' in plan.idle_reasons["gaudi:0"]
    with pytest.raises(LibraryError, match=r"Gaudi-2 \(library: HCCL\) is \"hpu\""):
        plan_cluster(make_cluster(("gaudi", GAUDI, 8)), WORKLOAD)
    with pytest.raises(LibraryError, match=r"limits\.library is HCCL|Gaudi-2"):
        limits = Limits(library="HCCL")
        plan_cluster(make_cluster(("g", GAUDI, 8), ("nv", NVIDIA, 2), limits=limits), WORKLOAD)


def test_a_search_of_its_own_is_refused_by_name() -> None:
    with pytest.raises(LibraryError, match="communication libraries are mixed"):
        make_problem(make_cluster(*TWO_MAKERS), WORKLOAD)


def test_a_mixed_plan_is_refused_by_every_verb(tmp_path: Path, capsys) -> None:
    nodes = [("amd", "MI300X", 2), ("nv", "H100-80GB", 3)]
    plan, cluster = with_width(nodes, "tp2:8 @8 | tp1:3,tp1:3,tp1:2 @8")
    with pytest.raises(PlanFormatError, match="communication libraries are mixed"):
        validate_plan(plan, cluster)
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    (tmp_path / "cluster.yaml").write_text(
        "version: 1\nnodes:\n  - {name: amd, gpu: MI300X, count: 2}\n"
        "  - {name: nv, gpu: H100, count: 3}\n"
        "links:\n  inside_node: {MI300X: {bandwidth: 40 GB/s, latency: 5 us},"
        " H100: {bandwidth: 300 GB/s, latency: 5 us}}\n"
        "  between_nodes: {bandwidth: 10 GB/s, latency: 9 us}\n"
    )
    on = ["--cluster", str(tmp_path / "cluster.yaml")]
    for words in (
        ["validate", str(path)],
        ["flags", str(path)],
        ["launch", str(path), "--for", "ssh", "-o", str(tmp_path / "job")],
        ["doctor", str(path), *on],
        ["simulate", str(path), *on],
        ["explain", str(path), *on],
    ):
        assert main(words) == 4, words
        assert "communication libraries are mixed" in capsys.readouterr().err


def test_an_own_type_keeps_its_library_in_the_plan() -> None:
    own = replace(NVIDIA, name="MY-CARD", library="RCCL")
    cluster = make_cluster(("a", own, 2))
    plan = plan_cluster(cluster, WORKLOAD)
    data = json.loads(json.dumps(plan_to_data(plan)))
    assert data["hosts"][0]["library"] == "RCCL"
    assert library_of(plan_from_data(data).hosts[0]) == "RCCL"
    back = make_cluster(("a", replace(own, library="NCCL"), 2))
    with pytest.raises(PlanFormatError, match="speaks RCCL in the plan, NCCL in the cluster"):
        validate_plan(plan, back)


def test_a_plan_says_the_library_of_an_unknown_maker() -> None:
    own = make_cluster(("a", replace(NVIDIA, name="MY-CARD"), 2))
    data = json.loads(json.dumps(plan_to_data(plan_cluster(own, WORKLOAD))))
    assert data["hosts"][0].pop("library") == "NCCL"
    with pytest.raises(PlanFormatError, match="the plan does not say its communication library"):
        validate_plan(plan_from_data(data))
    data["hosts"][0]["gpu_type"] = NVIDIA.name
    assert library_of(plan_from_data(data).hosts[0]) == "NCCL"


def test_amds_machines_get_their_own_variables() -> None:
    plan = plan_cluster(make_cluster(("amd", AMD, 2)), WORKLOAD)
    (launch,) = node_launches(plan, "plan.json")
    environment = dict(launch.environment)
    assert environment["HIP_VISIBLE_DEVICES"] in ("0,1", "1,0", "0", "1")
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"} & set(environment)
    two = plan_cluster(make_cluster(("a", AMD, 2), ("b", gpu_type("MI250"), 2)), WORKLOAD)
    if len(two.hosts) == 2:  # RCCL reads NCCL's names
        assert dict(node_launches(two, "plan.json")[0].environment)["NCCL_ALGO"] == "Ring"
