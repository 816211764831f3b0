"""What a plan changes or leaves out of a job is said, and the flags agree with the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.flags.emit import megatron_args
from megatron_hetero.flags.environment import exports_left, job_settings
from megatron_hetero.flags.notes import memory_savers, plan_notes, refused_words
from megatron_hetero.model.load import load_workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.place import place_in_order
from megatron_hetero.plan.plan import Plan
from tests.cost.builders import CLUSTER, make_workload

MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --vocab-size 128 --global-batch-size 12 "
)


def _plan(flags: str, layout: str = "tp2:3,tp1:1 @8 | tp1:4 @4") -> Plan:
    return plan_from_layout(parse_layout(layout), load_workload(None, (MODEL + flags).split()))


def _placed() -> Plan:
    return place_in_order(
        plan_from_layout(parse_layout("tp2:3,tp2:1 @4"), make_workload()), CLUSTER
    )


def _with_stages(plan: Plan, **settings: object) -> Plan:
    replicas = tuple(
        replace(r, stages=tuple(replace(s, **settings) for s in r.stages)) for r in plan.replicas
    )
    return replace(plan, replicas=replicas)


def test_recompute_that_the_plan_decides_is_no_flag_and_is_said() -> None:
    plan = _plan("--micro-batch-size 1 --recompute-activations")
    assert "--recompute-activations" in megatron_args(plan, "p.json")
    assert not plan_notes(plan)
    decided = _with_stages(plan, recompute="none")
    assert not any("recompute" in word for word in megatron_args(decided, "p.json"))
    (note,) = plan_notes(decided)
    assert "recompute none (the job: selective)" in note
    first = replace(plan.replicas[0].stages[0], recompute="full")
    mixed = replace(plan.replicas[0], stages=(first, *plan.replicas[0].stages[1:]))
    plan = replace(plan, replicas=(mixed, plan.replicas[1]))
    assert "--recompute-activations" in megatron_args(plan, "p.json")
    assert "recompute full and selective, by stage (the job: selective)" in plan_notes(plan)[0]


def test_the_micro_batch_size_of_the_flags_is_the_plan_s() -> None:
    plan = _plan("--micro-batch-size 1", "tp2:3,tp1:1 @4x2 | tp1:4 @2x2")
    words = " ".join(megatron_args(plan, "p.json"))
    assert "--micro-batch-size 2" in words and "--micro-batch-size 1" not in words
    assert "micro-batches of 2 (the job: 1)" in plan_notes(plan)[0]
    flags = "--micro-batch-size 1 --calculate-per-token-loss"
    unlike = _plan(flags, "tp2:3,tp1:1 @4x2 | tp1:4 @4x1")
    assert "--micro-batch-size 1" in " ".join(megatron_args(unlike, "p.json"))
    assert "micro-batches of 1 and 2 (the job: 1)" in plan_notes(unlike)[0]


@pytest.mark.parametrize(
    ("exported", "kept", "left"),
    [
        ("NCCL_IB_DISABLE=1", True, ""),
        ("NCCL_SOCKET_IFNAME=eth1", False, "--interface MACHINE=NAME"),
        ("NCCL_TOPO_FILE=/etc/topo.xml", False, "not carried over"),
        ("NCCL_TUNER_PLUGIN=evil.so", False, "not carried over"),
        ("NCCL_DEBUG=$(rm x)", False, "not carried over"),
        ("LD_PRELOAD=evil.so", False, ""),
        ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=0", False, ""),
    ],
)
def test_variables_of_the_script(exported: str, kept: bool, left: str) -> None:
    plan = _plan("--micro-batch-size 1")
    assert plan.workload is not None
    plan = replace(plan, workload=replace(plan.workload, exports=(exported,)))
    name, _, value = exported.partition("=")
    assert ((name, value) in {(s.name, s.value) for s in job_settings(plan)}) == kept
    said = " ".join(exports_left(plan))
    assert (left in said) if left else not said
    assert any(exported in note for note in plan_notes(plan)) == (kept or bool(left))


def test_the_plan_s_own_setting_wins_and_that_is_said() -> None:
    plan = _placed()
    assert plan.workload is not None
    plan = replace(plan, workload=replace(plan.workload, exports=("CUDA_DEVICE_ORDER=FASTEST",)))
    settings = {s.name: s.value for s in job_settings(plan)}
    assert settings["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert list(exports_left(plan)) == [
        "CUDA_DEVICE_ORDER=FASTEST of the script gives way to the plan's PCI_BUS_ID"
    ]


def test_flags_that_a_gpu_cannot_follow_are_named() -> None:
    plan = _plan("--micro-batch-size 1 --use-flash-attn")
    assert not plan_notes(plan)
    placed = _placed()
    host = replace(placed.hosts[0], gpu_type="V100-16GB")
    assert placed.workload is not None
    flags = (*placed.workload.megatron_args, "--use-flash-attn")
    workload = replace(placed.workload, megatron_args=flags)
    plan = replace(placed, workload=workload, hosts=(host, *placed.hosts[1:]))
    (note,) = (note for note in plan_notes(plan) if "will not run" in note)
    assert note.startswith("--use-flash-attn will not run") and "V100-16GB has 7.0" in note
    notes = plan_notes(plan, places={"--use-flash-attn": "gpt.sh:33"})
    assert f"gpt.sh:33: {note}" in notes


def test_refused_flags_are_told_in_the_right_number_and_stock_where_there_is_one() -> None:
    one = _plan("--micro-batch-size 1 --delay-wgrad-compute")
    assert "Take it out" in refused_words(one) and "--stock" in refused_words(one)
    assert "--stock" not in refused_words(one, has_stock=False)
    two = _plan("--micro-batch-size 1 --delay-wgrad-compute --use-precision-aware-optimizer")
    assert "Take them out" in refused_words(two)
    assert refused_words(_plan("--micro-batch-size 1")) == ""


def test_memory_savers_that_count_for_nothing_are_named() -> None:
    plan = _plan("--micro-batch-size 1 --optimizer-cpu-offload --cpu-offloading-num-layers 1")
    assert plan.workload is not None
    assert memory_savers(plan.workload).startswith(
        "--optimizer-cpu-offload and --cpu-offloading-num-layers of the job save memory"
    )
    assert memory_savers(make_workload()) == ""
