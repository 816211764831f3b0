"""From files to a plan, its file, its launch and its checks."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.errors import (
    InfeasiblePlanError,
    PlanFormatError,
    UnsupportedError,
    UsageError,
)
from megatron_hetero.serving.checks import check_fleet
from megatron_hetero.serving.compose.milp import serve_most
from megatron_hetero.serving.compose.problem import faults
from megatron_hetero.serving.fleet.api import planned_fleet
from megatron_hetero.serving.fleet.file import (
    is_serving_plan,
    load_serving_plan,
    save_serving_plan,
)
from megatron_hetero.serving.fleet.offers import make_fleet
from megatron_hetero.serving.fleet.place import placed_replicas
from megatron_hetero.serving.fleet.plan import PlannedReplica, ServingPlan, check_plan
from megatron_hetero.serving.launch.folder import fleet_files
from megatron_hetero.serving.prices.engine import ENGINES
from megatron_hetero.serving.prices.served import load_served
from megatron_hetero.serving.replan import compare_plans
from megatron_hetero.serving.workload.load import load_request_mix
from megatron_hetero.serving.workload.requests import RequestMix

EXAMPLE = Path(__file__).resolve().parents[3] / "examples/serving"
CLUSTER = load_cluster(EXAMPLE / "cluster.yaml")
SERVED = load_served(EXAMPLE, "16-bit", "16-bit")
MIX = load_request_mix(EXAMPLE / "workload.yaml")


def plan_serving(*given: object, **named: object) -> ServingPlan:
    plan, *_ = planned_fleet(*given, **named)  # type: ignore[arg-type]
    return plan


@pytest.fixture(scope="module")
def cheapest() -> ServingPlan:
    return plan_serving(CLUSTER, SERVED, MIX, "cost")


@pytest.fixture(scope="module")
def largest() -> ServingPlan:
    return plan_serving(CLUSTER, SERVED, MIX, "throughput")


def test_the_cheapest_fleet_keeps_its_deadlines_and_its_bound(cheapest: ServingPlan) -> None:
    assert cheapest.forecast is not None
    assert all(c.attainment >= MIX.attainment for c in cheapest.forecast.classes)
    assert cheapest.cost_per_hour is not None
    assert cheapest.bound <= cheapest.cost_per_hour
    entries = [r for r in cheapest.replicas if r.phase != "decode"]
    served = [sum(r.rates[w] for r in entries) for w in range(2)]
    assert served == pytest.approx(MIX.demand)


def test_machines_of_ones_own_cost_nothing() -> None:
    own = replace(CLUSTER.nodes[0], price_per_hour=0.0)
    cluster = replace(CLUSTER, nodes=(own, *CLUSTER.nodes[1:]))
    plan = plan_serving(cluster, SERVED, MIX, "cost")
    assert (plan.cost_per_hour, plan.bound, plan.gap) == (0.0, 0.0, 0.0)
    assert {d.split(":")[0] for r in plan.replicas for s in r.stages for d in s.devices} == {
        own.name
    }
    # Nothing but machines of one's own: a price too.
    assert plan_serving(replace(cluster, nodes=(own,)), SERVED, MIX, "cost").cost_per_hour == 0.0


def test_all_machines_serve_more_and_a_budget_less(largest: ServingPlan) -> None:
    assert largest.scale <= largest.bound * (1 + 1e-9)
    assert largest.gap <= 0.005 + 1e-9
    bought = plan_serving(CLUSTER, SERVED, MIX, budget_per_hour=8.0)
    assert bought.cost_per_hour is not None
    assert bought.cost_per_hour <= 8.0
    assert bought.scale < largest.scale


def test_goodput_keeps_deadlines_at_its_load() -> None:
    small = replace(
        CLUSTER, nodes=CLUSTER.nodes[1:3], node_links=CLUSTER.node_links
    )  # fmt: skip
    plan = plan_serving(small, SERVED, MIX, "goodput")
    assert plan.forecast is not None
    assert 0 < plan.forecast.load <= plan.bound
    assert all(c.attainment >= MIX.attainment for c in plan.forecast.classes)


def test_equal_inputs_give_equal_bytes_and_the_file_reads_back(
    largest: ServingPlan, tmp_path: Path
) -> None:
    again = plan_serving(CLUSTER, SERVED, MIX, "throughput")
    save_serving_plan(largest, tmp_path / "a.json")
    save_serving_plan(again, tmp_path / "b.json")
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert load_serving_plan(tmp_path / "a.json") == largest
    assert is_serving_plan(tmp_path / "a.json")


def test_a_plan_edited_wrongly_is_refused(largest: ServingPlan, tmp_path: Path) -> None:
    save_serving_plan(largest, tmp_path / "serve.json")
    data = json.loads((tmp_path / "serve.json").read_text())

    def refused(message: str) -> None:
        (tmp_path / "serve.json").write_text(json.dumps(data))
        with pytest.raises(PlanFormatError, match=message):
            load_serving_plan(tmp_path / "serve.json")

    first = data["plan"]["replicas"][0]
    first["wieght"] = 1
    refused(r"replicas\[0\]\.wieght: unexpected")
    del first["wieght"]
    first["stages"][0]["num_layers"] -= 1
    refused("its stages hold 31 layers; the model has 32")
    first["stages"][0]["num_layers"] += 1
    first["stages"][0]["devices"] = data["plan"]["replicas"][1]["stages"][0]["devices"]
    refused("is in 2 places")


def test_what_cannot_be_planned_is_named() -> None:
    prices_gone = replace(
        CLUSTER, nodes=tuple(replace(n, price_per_hour=None) for n in CLUSTER.nodes)
    )
    with pytest.raises(UsageError, match="no prices"):
        plan_serving(prices_gone, SERVED, MIX, "cost")
    slow = replace(MIX.classes[0], first_token_s=1e-4)
    with pytest.raises(InfeasiblePlanError, match='class "chat"'):
        plan_serving(CLUSTER, SERVED, RequestMix((slow, MIX.classes[1])))
    busy = tuple(replace(c, rate_per_s=1000 * c.rate_per_s) for c in MIX.classes)
    with pytest.raises(InfeasiblePlanError, match="times the workload's rates at most"):
        plan_serving(CLUSTER, SERVED, RequestMix(busy), "cost")


def test_widths_up_to_a_machine_are_placed_without_gaps() -> None:
    fleet = make_fleet(CLUSTER, SERVED, ENGINES["any"], MIX)
    problem = fleet.composing()
    for utilization in (1.0, 0.7, 0.4):
        found = serve_most(replace(problem, utilization=utilization), gap=1e-3)
        assert faults(replace(problem, utilization=utilization), found) == []
        replicas = placed_replicas(fleet, found)
        used = [d for r in replicas for s in r.stages for d in s.devices]
        assert len(used) == len(set(used))
        for replica in replicas:
            for stage in replica.stages:
                assert len({d.rpartition(":")[0] for d in stage.devices}) == 1


def _plan_of(plan: ServingPlan, *replicas: PlannedReplica) -> ServingPlan:
    return replace(plan, replicas=replicas, hand_overs=())


def test_scripts_are_bash_with_the_engines_flags(largest: ServingPlan, tmp_path: Path) -> None:
    files, start = fleet_files(largest, "ssh")
    scripts = [file for file in files if file.executable]
    for file in scripts:
        path = tmp_path / file.name
        path.write_text(file.text)
        subprocess.run(["bash", "-n", str(path)], check=True)
    assert "start.sh" in start
    routes = json.loads(next(f.text for f in files if f.name == "routes.json"))
    rates = [sum(r["requests_per_s"].values()) for r in routes["replicas"] if r["phase"] == "both"]
    assert sum(rates) > 0
    text = next(f.text for f in files if f.name == "prefill-0.sh")
    assert '"kv_connector":"NixlConnector"' in text
    assert "--max-num-batched-tokens 8192 " in text
    # A model may have more positions than the replica has room for.
    assert "--max-model-len auto " in text
    decoders = next(f.text for f in files if f.name == "router-prefill-decode.sh")
    assert decoders.count("--decode ") == sum(r.phase == "decode" for r in largest.replicas)


def test_an_uneven_pipeline_says_its_layers_and_ranks(largest: ServingPlan) -> None:
    replica = largest.replicas[0]
    one = replace(replica.stages[0], num_layers=20)
    other = replace(one, devices=("l40s-1:3",), host="l40s-1", num_layers=12)
    plan = _plan_of(largest, replace(replica, phase="both", stages=(one, other)))
    check_plan(plan)
    texts = {f.name: f.text for f in fleet_files(plan, "vllm")[0]}
    first, second = texts[f"{replica.name}-0.sh"], texts[f"{replica.name}-1.sh"]
    assert "VLLM_PP_LAYER_PARTITION=20,12" in first
    assert "--nnodes 2 --node-rank 0" in first
    assert "--node-rank 1" in second
    assert "--headless" in second


def test_what_no_engine_runs_is_refused_by_name(largest: ServingPlan) -> None:
    replica = largest.replicas[0]
    wide = replace(replica.stages[0], devices=("l40s-1:2", "l40s-1:3"), num_layers=16)
    narrow = replace(replica.stages[0], num_layers=16)
    plan = _plan_of(largest, replace(replica, phase="both", stages=(narrow, wide)))
    with pytest.raises(UnsupportedError, match="unlike tensor-parallel widths"):
        fleet_files(plan, "vllm")
    with pytest.raises(UsageError, match="made for vllm"):
        fleet_files(largest, "sglang")
    assert "serve-unlike-widths" in {f.id for f in check_fleet(plan, CLUSTER)}


def test_ssh_starts_our_serve_where_widths_are_unlike(largest: ServingPlan, tmp_path: Path) -> None:
    replica = largest.replicas[0]
    stage = replica.stages[0]
    wide = replace(stage, devices=("l40s-1:2", "l40s-1:3"), host="l40s-1", num_layers=20)
    narrow = replace(stage, devices=("l40s-1:1",), host="l40s-1", num_layers=12)
    ours = replace(replica, name="ours", phase="both", stages=(wide, narrow))
    theirs = replace(replica, name="theirs", phase="both", stages=(replace(
        stage, devices=("l40s-0:0",), host="l40s-0"),))  # fmt: skip
    plan = _plan_of(largest, ours, theirs)
    files = {f.name: f for f in fleet_files(plan, "ssh")[0]}
    for file in files.values():
        (tmp_path / file.name).write_text(file.text)
    assert load_serving_plan(tmp_path / "serve.json") == plan
    script = files["ours.sh"].text
    assert "megatron-hetero serve" in script
    assert "--plan serve.json --replica ours --host l40s-1 --port 8100" in script
    assert "vllm serve" in files["theirs.sh"].text
    router = files["router.sh"].text
    assert "--replica ours=http://l40s-1:8100 --replica theirs=http://l40s-0:8101" in router
    for name in ("ours.sh", "router.sh", "start.sh"):
        subprocess.run(["bash", "-n", str(tmp_path / name)], check=True)
    far = replace(narrow, devices=("l40s-0:1",), host="l40s-0")
    with pytest.raises(UnsupportedError, match="torchrun"):
        fleet_files(_plan_of(largest, replace(ours, stages=(wide, far))), "ssh")
    with pytest.raises(UnsupportedError, match="phase alone"):
        fleet_files(_plan_of(largest, replace(ours, phase="prefill"),
                             replace(theirs, phase="decode")), "ssh")  # fmt: skip


def test_skyserve_routes_by_what_each_type_serves(cheapest: ServingPlan) -> None:
    one = cheapest.replicas[0]
    plan = _plan_of(cheapest, replace(one, phase="both"))
    (service, _), _ = fleet_files(plan, "skypilot")
    assert "instance_aware_least_load" in service.text
    assert '"L40S:1":' in service.text


def test_a_lost_machine_is_found_and_a_new_plan_keeps_what_stays(largest: ServingPlan) -> None:
    lost = CLUSTER.without(["h100-0"])
    smaller = replace(lost, nodes=tuple(n for n in CLUSTER.nodes if n.name != "h100-0"))
    assert {f.id for f in check_fleet(largest, smaller)} >= {"serve-gpu-missing"}
    new = plan_serving(lost, SERVED, MIX)
    change = compare_plans(largest, new, stable_s=3600.0)
    assert new.scale < largest.scale
    assert len(change.stays) + len(change.starts) == len(new.replicas)
    same = compare_plans(largest, largest, stable_s=3600.0)
    assert (same.reload_s, same.kept_part, same.pays) == (0.0, pytest.approx(1.0), False)
    better = replace(new, scale=2 * largest.scale)
    assert compare_plans(largest, better, 3600.0).pays
    assert not compare_plans(largest, better, change.reload_s).pays or not change.starts


def test_a_budget_without_limit_is_none(largest: ServingPlan) -> None:
    assert largest.budget_per_hour is None
    assert plan_serving(CLUSTER, SERVED, MIX, budget_per_hour=inf).budget_per_hour is None


def test_a_format_that_no_card_runs_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    link = "{V100-32GB: {bandwidth: 100 GB/s, latency: 5 us}}"
    path.write_text(
        "version: 1\nnodes:\n  - {name: a, gpu: V100-32GB, count: 8}\n"
        f"links:\n  inside_node: {link}\n"
    )
    with pytest.raises(InfeasiblePlanError, match=r"\(V100-32GB\) runs fp8 weights"):
        make_fleet(load_cluster(path), load_served(EXAMPLE, "fp8", "16-bit"), ENGINES["vllm"], MIX)


@pytest.mark.parametrize("target", ["vllm", "sglang"])
def test_engines_are_told_fp8_of_checkpoints_in_16_bits_alone(
    target: str, largest: ServingPlan
) -> None:
    """They refuse a name that differs from the checkpoint's own (compressed-tensors)."""
    engine = replace(largest.engine, name=target)  # type: ignore[arg-type]
    for is_quantized in (False, True):
        model = replace(largest.model, weights="fp8", is_quantized=is_quantized)
        files, _ = fleet_files(replace(largest, model=model, engine=engine), target)
        scripts = [f.text for f in files if "--tp-size" in f.text or "vllm serve" in f.text]
        assert scripts
        assert all(("--quantization fp8" in text) != is_quantized for text in scripts)


def test_latent_attention_has_blocks_that_its_kernels_take(tmp_path: Path) -> None:
    """vLLM takes no FlashMLA and no FlashInfer kernel for a named block of 16."""
    config = {
        "model_type": "deepseek_v2", "vocab_size": 1000, "num_hidden_layers": 2,
        "hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_attention_heads": 8, "num_key_value_heads": 8, "n_shared_experts": 1,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "kv_lora_rank": 64, "q_lora_rank": None,
        "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64,
        "first_k_dense_replace": 1, "max_position_embeddings": 4096,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    latent = load_served(tmp_path, None, "16-bit")
    one = replace(CLUSTER, nodes=CLUSTER.nodes[:1]).without(
        [f"{CLUSTER.nodes[0].name}:{index}" for index in (1, 2, 3)]
    )
    mix = replace(MIX, classes=MIX.classes[:1])
    for served, tokens in ((latent, 64), (SERVED, 16)):
        plan = plan_serving(one, served, mix, "cost")
        assert plan.engine.block_tokens == tokens
        files, _ = fleet_files(plan, "vllm")
        assert any(f"--block-size {tokens} " in file.text for file in files)


def test_a_reserve_of_memory_is_left_by_the_engine() -> None:
    """The engine was told to fill 90 % of every card, whatever the cluster's limits keep free."""
    one = replace(CLUSTER, nodes=CLUSTER.nodes[:1])
    mix = replace(MIX, classes=MIX.classes[:1])
    total = one.nodes[0].gpu_type.memory_bytes
    plans = []
    for reserve in (int(0.05 * total), int(0.3 * total)):
        limits = replace(one.limits, memory_reserve_bytes=reserve)
        plans.append(plan_serving(replace(one, limits=limits), SERVED, mix, "cost"))
    assert [plan.engine.memory_part for plan in plans] == [0.9, 0.7]
    held = [plan.replicas[0].kv_tokens for plan in plans]
    fewer = 0.2 * total / (SERVED.model.num_layers * SERVED.kv_bytes(width=1))
    assert held[0] - held[1] == pytest.approx(fewer, abs=17)
    files, _ = fleet_files(plans[1], "vllm")
    assert any("--gpu-memory-utilization 0.7 " in file.text for file in files)
