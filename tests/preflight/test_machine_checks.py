"""Machines side by side: alike ones get no finding, each planted difference its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.names import device_place
from megatron_hetero.plan.plan import LayerRange, Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.planner import plan_and_explain
from megatron_hetero.preflight.check import check_job
from megatron_hetero.preflight.groups import group_tests
from megatron_hetero.preflight.job import Job, make_job
from megatron_hetero.preflight.machine import MachineFacts
from megatron_hetero.preflight.machine_checks import GIB, attention_is_fused, check_machines
from tests.cost.builders import make_workload
from tests.preflight.jobs import MIXED_NCCL, planned, with_flags, with_width

PLAN, CLUSTER = planned(("a", "A100-80GB", 1), ("b", "H100-80GB", 1), num_layers=4)
JOB = make_job(PLAN, CLUSTER, MIXED_NCCL)
GPU = {
    "a": ("NVIDIA A100-SXM4-80GB", "8.0"),
    "b": ("NVIDIA H100 80GB HBM3", "9.0"),
}


def facts(**of_last_rank: Any) -> tuple[MachineFacts, ...]:
    """Sound machines for `JOB`; the keywords change the last rank."""
    made = []
    ranks = [(host, i) for host in PLAN.hosts for i in host.gpu_indices]
    for rank, (host, _) in enumerate(ranks):
        name, capability = GPU[host.node]
        made.append(
            MachineFacts(
                rank=rank,
                host_names=(host.host,),
                addresses=("10.0.0.1",),
                interfaces=("lo", "eno1"),
                gpu_name=name,
                gpu_capability=capability,
                free_bytes=78 * GIB,
                torch="2.9.0",
                cuda="12.8",
                nccl="2.27.5",
                megatron_core="0.19.2",
                transformer_engine="2.8",
                has_apex=True,
                gpu_architectures=("sm_80", "sm_86", "sm_90", "compute_90"),
                environment={"NCCL_ALGO": "Ring"},
            )
        )
    made[-1] = made[-1].model_copy(update=of_last_rank)
    return tuple(made)


def ids(job: Job, found: tuple[MachineFacts, ...]) -> set[str]:
    return {finding.id for finding in check_machines(job, found)}


def test_sound_machines_get_no_finding() -> None:
    assert ids(JOB, facts()) == set()
    assert ids(JOB, facts(environment={"NCCL_SOCKET_IFNAME": "eno"})) == set()
    assert ids(JOB, facts(environment={"NCCL_SOCKET_IFNAME": "^docker"})) == set()


@pytest.mark.parametrize(
    ("id_", "change"),
    [
        ("torch-versions-differ", {"torch": "2.8.0"}),
        ("cuda-versions-differ", {"cuda": "12.6"}),
        ("nccl-versions-differ", {"nccl": "2.26.2"}),
        ("megatron-versions-differ", {"megatron_core": "0.19.1"}),
        ("te-versions-differ", {"transformer_engine": "2.7"}),
        ("gpu-architecture-not-built", {"gpu_architectures": ("sm_60", "sm_70")}),
        ("gpu-type-differs", {"gpu_name": "NVIDIA A10", "gpu_capability": "8.6"}),
        ("host-differs", {"host_names": ("elsewhere",), "addresses": ()}),
        ("memory-taken", {"free_bytes": GIB // 8}),
        ("interface-missing", {"environment": {"NCCL_SOCKET_IFNAME": "ib0"}}),
        ("interface-missing", {"environment": {"NCCL_SOCKET_IFNAME": "=eno"}}),
        ("interface-missing", {"environment": {"GLOO_SOCKET_IFNAME": "eno"}}),
    ],
)
def test_a_planted_difference_is_found_and_nothing_else(id_: str, change: dict[str, Any]) -> None:
    assert ids(JOB, facts(**change)) == {id_}


def test_missing_kernels_are_found() -> None:
    without = tuple(fact.model_copy(update={"transformer_engine": None}) for fact in facts())
    assert ids(JOB, without) == {"te-missing"}
    without = tuple(fact.model_copy(update={"has_apex": False}) for fact in without)
    local = replace(JOB, plan=with_flags(PLAN, "--transformer-impl=local"))
    assert ids(local, without) == {"apex-missing"}
    plain = with_flags(
        PLAN,
        "--transformer-impl=local",
        "--no-persist-layer-norm",
        "--no-gradient-accumulation-fusion",
    )
    assert ids(replace(JOB, plan=plain), without) == set()


def test_the_output_layer_needs_apex_beside_transformer_engine_too() -> None:
    """It is Megatron's own `ColumnParallelLinear`, whose default refuses to be built without."""
    without = tuple(fact.model_copy(update={"has_apex": False}) for fact in facts())
    (found, *_) = check_machines(JOB, without)
    assert found.id == "apex-missing" and found.remedy == "add --no-gradient-accumulation-fusion"
    plain = with_flags(PLAN, "--no-gradient-accumulation-fusion")
    assert ids(replace(JOB, plan=plain), without) == set()


def test_stored_scores_are_found_where_the_plan_counts_on_a_fused_kernel() -> None:
    unfused = tuple(fact.model_copy(update={"attention": "unfused"}) for fact in facts())
    assert PLAN.workload is not None
    training = PLAN.workload.training

    def job(flash_attention: bool) -> Job:
        other = replace(training, flash_attention=flash_attention)
        return replace(JOB, plan=replace(PLAN, workload=replace(PLAN.workload, training=other)))

    assert ids(job(True), unfused) == {"attention-unfused"}
    assert ids(job(False), unfused) == set()
    known = tuple(fact.model_copy(update={"attention": "fused"}) for fact in facts())
    assert ids(job(True), known) == set()


def test_divided_sequences_need_a_fused_kernel() -> None:
    """On each of the ranks that divide them, and on no other."""
    made = with_width((("a", "A100-80GB", 3),), "tp1cp2:4,tp1:4 @16")
    ranks = [MachineFacts(rank=rank, torch="2.11.0", attention="unfused") for rank in range(3)]
    found = attention_is_fused(make_job(*made), ranks)
    assert [one.severity for one in found] == ["error", "error", "warning"]


def test_a_release_known_to_return_wrong_sums_is_found() -> None:
    old = tuple(fact.model_copy(update={"nccl": "2.18.3"}) for fact in facts())
    assert ids(JOB, old) == {"nccl-known-wrong"}


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ("8.9", ("sm_80",), True),
        ("8.6", ("sm_89",), False),
        ("12.0", ("sm_90", "compute_90"), True),
        ("12.0", ("sm_90",), False),
        ("9.0", ("sm_90a",), True),
    ],
)
def test_which_builds_run_on_which_gpu(capability: str, built: tuple[str, ...], runs: bool) -> None:
    fact = facts(gpu_capability=capability, gpu_architectures=built)
    assert ("gpu-architecture-not-built" not in ids(JOB, fact)) is runs


def test_the_groups_are_those_of_the_runtime() -> None:
    """tp2 beside tp1: each half of a layer has two holders of its own."""
    plan, _ = with_width((("a", "A100-80GB", 2), ("b", "A100-80GB", 1)), "tp2:8 @10 | tp1:8 @6")
    names = {(test.kind, test.ranks) for test in group_tests(plan)}
    assert names == {
        ("collective", (0, 1)),
        ("collective", (0, 2)),
        ("collective", (1, 2)),
        ("collective", (0, 1, 2)),
    }
    plan, _ = with_width((("a", "A100-80GB", 2), ("b", "A100-80GB", 1)), "tp2:6,tp1:2 @16")
    boundary = next(test for test in group_tests(plan) if test.kind == "boundary")
    assert (boundary.ranks, boundary.senders) == ((0, 1, 2), (0, 1))


BOX = """\
version: 1
nodes:
  - name: box
    gpus: [{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]
    link: {bandwidth: 12 GB/s, latency: 12 us}
    pairs: [{cards: [1, 2], bandwidth: 40 GB/s, latency: 5 us}]
"""
BUS = ("00000000:01:00.0", "00000000:21:00.0", "00000000:22:00.0")


@cache
def boxed_plan(source: str, path: Path) -> Plan:
    workload = make_workload(num_layers=8, global_batch_size=16, hidden_size=2048)
    return plan_and_explain(load_cluster(path), workload)[0]


def boxed_job(tmp_path: Path, *variables: str) -> tuple[Job, tuple[MachineFacts, ...]]:
    """A job on an RTX 4090 beside two RTX 3090 with a bridge, and what its sound machine shows."""
    path = tmp_path / "cluster.yaml"
    path.write_text(BOX)
    cluster = load_cluster(path)
    plan = boxed_plan(cluster.source, path)
    assert set(plan.type_by_device) == {"box:0", "box:1", "box:2"}
    job = make_job(plan, cluster, variables)
    names = {"RTX-4090": ("NVIDIA GeForce RTX 4090", "8.9"),
             "RTX-3090": ("NVIDIA GeForce RTX 3090", "8.6")}  # fmt: skip
    made = []
    for rank, (device, type_) in enumerate(plan.type_by_device.items()):
        index = int(device[-1])
        made.append(
            facts()[0].model_copy(
                update={
                    "rank": rank,
                    "host_names": ("box",),
                    "gpu_name": names[type_][0],
                    "gpu_capability": names[type_][1],
                    "gpu_architectures": ("sm_86", "sm_89"),
                    "free_bytes": 23 * GIB,
                    "total_bytes": 24 * GIB,
                    "bus_id": BUS[index],
                    "bus_place": index,
                    "peers": () if type_ == "RTX-4090" else (1, 2),
                    "environment": {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
                }
            )
        )
    return job, tuple(made)


def test_cards_of_a_box_are_told_apart_by_the_bus(tmp_path: Path) -> None:
    job, sound = boxed_job(tmp_path)
    assert ids(job, sound) == set()
    one, two, three = sound
    swapped = (
        one,
        two.model_copy(update={"bus_id": three.bus_id, "bus_place": 2}),
        three.model_copy(update={"bus_id": two.bus_id, "bus_place": 1}),
    )
    assert ids(job, swapped) == {"gpu-order-differs"}
    # In CUDA's own order the two RTX 3090 could be others that come in the same order.
    moved = tuple(
        fact.model_copy(update={"bus_place": fact.bus_place + 1, "environment": {}})
        for fact in sound
    )
    assert ids(job, moved) == {"gpu-order-differs"}
    screen = (one.model_copy(update={"drives_screen": True}), two, three)
    assert ids(job, screen) == {"screen-on-gpu"}
    alone = tuple(fact.model_copy(update={"peers": ()}) for fact in sound)
    assert ids(job, alone) == {"peer-to-peer-refused"}


def test_peer_to_peer_of_a_box_is_held_back_but_for_its_bridge(tmp_path: Path) -> None:
    job, _ = boxed_job(tmp_path)
    assert job.variable("NCCL_P2P_LEVEL") == {"box": "NVL"}
    assert job.variable("NCCL_P2P_DISABLE") == {"box": None}
    found = {finding.id for finding in check_job(job)}
    assert not found & {"p2p-on-consumer-card", "nvlink-switched-off"}
    off, _ = boxed_job(tmp_path, "NCCL_P2P_DISABLE=1")
    assert "nvlink-switched-off" in {finding.id for finding in check_job(off)}
    everywhere, _ = boxed_job(tmp_path, "NCCL_P2P_LEVEL=SYS")
    (finding,) = [f for f in check_job(everywhere) if f.id == "p2p-on-consumer-card"]
    assert "NCCL_P2P_LEVEL=NVL on box" in finding.remedy


def test_every_rank_has_the_card_of_the_launch_order(tmp_path: Path) -> None:
    for job in (JOB, boxed_job(tmp_path)[0]):
        assert list(job.devices) == [place.device for place in rank_table(job.plan)]
        for device in job.devices:
            host = job.host_by_node[device_place(device)[0]]
            assert device in host.type_by_device


def test_old_cards_beside_new_ones_cost_precision_and_kernels() -> None:
    job = make_job(*planned(("a", "RTX-2080-Ti", 2), ("b", "RTX-4090", 2), precision="fp16"))
    (finding,) = [f for f in check_job(job) if f.id == "compute-capabilities-differ"]
    assert finding.where == "RTX-2080-Ti (7.5) beside RTX-4090 (8.9)"
    alike = make_job(*planned(("a", "RTX-3090", 2), ("b", "RTX-4090", 2)))
    assert "compute-capabilities-differ" not in {f.id for f in check_job(alike)}


def test_the_groups_of_context_parallel_stages_are_apart() -> None:
    plan, _ = with_width((("a", "A100-80GB", 4),), "tp2cp2:8 @16")
    found = {test.name.partition(",")[0]: set[tuple[int, ...]]() for test in group_tests(plan)}
    for test in group_tests(plan):
        found[test.name.partition(",")[0]].add(test.ranks)
    assert found["tensor parallel"] == {(0, 1), (2, 3)}
    assert found["context parallel"] == {(0, 2), (1, 3)}


def test_an_interleaved_pipeline_goes_on_from_its_last_stage_to_its_first() -> None:
    plan, _ = with_width((("a", "A100-80GB", 3),), "tp1:4,tp1:2,tp1:2 @8")
    (replica,) = plan.replicas

    def boundaries(*chunks: tuple[LayerRange, ...]) -> dict[str, tuple[int, ...]]:
        stages = tuple(
            replace(stage, first_layer=own[0].first_layer, chunks=own)
            for stage, own in zip(replica.stages, chunks, strict=True)
        )
        made = replace(plan, replicas=(replace(replica, stages=stages),))
        return {t.name: t.ranks for t in group_tests(made) if t.kind == "boundary"}

    once = {
        "boundary between stages 0 and 1 of replica 0": (0, 1),
        "boundary between stages 1 and 2 of replica 0": (1, 2),
    }
    assert boundaries((LayerRange(0, 4),), (LayerRange(4, 2),), (LayerRange(6, 2),)) == once
    one_by_one = [[LayerRange(s + 3 * chunk, 1) for chunk in (0, 1)] for s in (0, 1, 2)]
    found = boundaries(*map(tuple, one_by_one))
    assert found == once | {"boundary between stages 0 and 2 of replica 0": (0, 2)}


def test_the_holders_of_a_layer_are_found_by_chunks() -> None:
    """Two chunks a stage: layers 2 and 3 are on the second stage of the first replica."""
    plan, _ = with_width((("a", "A100-80GB", 4),), "tp1:4,tp1:4 @8 | tp1:4,tp1:4 @8")
    first, *others = plan.replicas
    chunks = [(LayerRange(s * 2, 2), LayerRange(4 + s * 2, 2)) for s in (0, 1)]
    stages = tuple(
        replace(stage, first_layer=c[0].first_layer, chunks=c)
        for stage, c in zip(first.stages, chunks, strict=True)
    )
    plan = replace(plan, replicas=(replace(first, stages=stages), *others))
    ranks = {test.ranks for test in group_tests(plan) if test.name.startswith("gradients")}
    assert ranks == {(0, 2), (1, 2), (0, 3), (1, 3)}
