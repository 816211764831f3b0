"""Planted faults are found by their id, each alone; sound clusters get no finding at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from megatron_hetero.cluster.doubt import Doubt
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import PlanFormatError, UsageError
from megatron_hetero.flags.support.lookup import refused_options
from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.model.unread import Unread
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.preflight.check import check_plan_on_cluster
from megatron_hetero.preflight.job import make_job
from tests.preflight.jobs import MIXED_NCCL, planned, with_flags, with_host, with_width

IB = Link(25e9, 5e-6)

Job = Callable[[], tuple[Plan, Cluster]]
"""A plan and its cluster, made when a test asks: workers collect every test and run a part."""

SOUND: tuple[tuple[Job, tuple[str, ...]], ...] = (
    (partial(planned, ("a", "A100-80GB", 8)), ()),
    (partial(planned, ("a", "A100-80GB", 4), ("b", "A100-80GB", 4)), ()),
    (partial(planned, ("a", "H100-80GB", 4), ("b", "A100-80GB", 4)), MIXED_NCCL),
    (partial(planned, ("a", "A100-40GB", 2), ("b", "A10", 2), ("c", "L40S", 2)), MIXED_NCCL),
    (partial(planned, ("v", "V100-32GB", 4), precision="fp16"), ()),
    (partial(planned, ("v", "V100-32GB", 2), ("t", "T4", 2), precision="fp16"), MIXED_NCCL),
    (partial(planned, ("r", "RTX-4090", 1)), ()),
    (partial(planned, ("r", "RTX-4090", 4)), ("r:NCCL_P2P_DISABLE=1",)),
    (
        partial(planned, ("a", "A100-80GB", 2), ("r", "RTX-4090", 4)),
        (*MIXED_NCCL, "r:NCCL_P2P_DISABLE=1"),
    ),
    (partial(planned, ("r", "RTX-3090", 2), ("s", "RTX-3080", 2)), MIXED_NCCL),
    (partial(planned, ("a", "H100-80GB", 4), ("b", "B200", 2)), MIXED_NCCL),
    (partial(planned, ("a", "A100-80GB", 2), ("b", "A100-80GB", 2), sites=("x", "y")), ()),
    (partial(with_width, (("a", "A100-80GB", 4), ("b", "A100-80GB", 2)), "tp4:6,tp2:2 @16"), ()),
)


@pytest.mark.parametrize(("job", "settings"), SOUND, ids=range(len(SOUND)))
def test_nothing_is_invented_about_a_sound_cluster(job: Job, settings: tuple[str, ...]) -> None:
    assert check_plan_on_cluster(*job(), settings) == ()


A100S = partial(planned, ("a", "A100-80GB", 4), ("b", "A100-80GB", 4))
MIXED = partial(planned, ("a", "A100-80GB", 2), ("b", "A10", 2))
WIDE = partial(with_width, (("a", "A100-80GB", 4), ("b", "A100-80GB", 2)), "tp4:6,tp2:2 @16")
DIVIDED = partial(with_width, (("a", "A100-80GB", 4),), "tp1cp2:4,tp1cp2:4 @16")
TURING = partial(planned, ("t", "T4", 4), precision="fp16")


def flagged(job: Job, *flags: str) -> tuple[Plan, Cluster]:
    plan, cluster = job()
    return with_flags(plan, *flags), cluster


def in_bf16() -> tuple[Plan, Cluster]:
    plan, cluster = TURING()
    assert plan.workload is not None
    training = replace(plan.workload.training, precision="bf16")
    return replace(plan, workload=replace(plan.workload, training=training)), cluster


def without_words() -> tuple[Plan, Cluster]:
    plan, cluster = MIXED()
    assert plan.workload is not None
    unread = tuple(Unread(name, "gpt.sh:4", "$X is not set") for name in ("--save", "--seed", ""))
    return replace(plan, workload=replace(plan.workload, unread=unread)), cluster


def with_stage_precision() -> tuple[Plan, Cluster]:
    plan, cluster = planned(("v", "V100-32GB", 1), precision="fp16")
    (replica,) = plan.replicas
    stages = (replace(replica.stages[0], precision="bf16"), *replica.stages[1:])
    return replace(plan, replicas=(replace(replica, stages=stages),)), cluster


def of_another_cluster() -> tuple[Plan, Cluster]:
    plan, cluster = A100S()
    return plan, replace(cluster, nodes=(replace(cluster.nodes[0], num_gpus=1), cluster.nodes[1]))


def on_smaller_memory(part: float) -> tuple[Plan, Cluster]:
    """The reserve raised until `part` of the memory is left on the fullest GPU."""
    plan, cluster = planned(("a", "A100-80GB", 1))
    assert plan.estimates is not None
    (device,) = plan.estimates.devices.values()
    left = round(device.capacity_bytes * part)
    reserve = device.capacity_bytes - device.peak_bytes - left
    cluster = replace(cluster, limits=Limits(memory_reserve_bytes=reserve))
    return replace(plan, inputs={}, estimates=None), cluster


def across_sites() -> tuple[Plan, Cluster]:
    plan, cluster = planned(
        ("a", "A100-80GB", 2), ("b", "A100-80GB", 2), ("c", "A100-80GB", 2), sites=("x", "x", "y")
    )
    links = {**cluster.node_links, ("a", "b"): IB, ("b", "a"): IB}
    return replace(plan, inputs={}), replace(cluster, node_links=links)


def on_older_cards() -> tuple[Plan, Cluster]:
    """Cards of a cluster file, of which a plan knows the name alone."""
    plan, cluster = DIVIDED()
    older = replace(cluster.nodes[0].gpu_type, compute_capability="7.5")
    return plan, replace(cluster, nodes=(replace(cluster.nodes[0], gpu_type=older),))


UNLIKE = partial(with_width, (("a", "A100-80GB", 2), ("b", "A100-80GB", 1)), "tp2:8 @12 | tp1:8 @4")

def with_doubt() -> tuple[Plan, Cluster]:
    plan, cluster = A100S()
    return plan, replace(cluster, doubts=(Doubt("cluster.yaml:8", "too fast", "write less"),))


OF_ANOTHER_JOB = (
    "--num-layers 8 --hidden-size 1024 --num-attention-heads 8 --seq-length 128 --bf16 "
    "--max-position-embeddings 256 --global-batch-size 16 --micro-batch-size 1"
)
"""The flags of the plans here, but for the length of a sequence, which is 256."""

FAULTS: tuple[
    tuple[str, Job, tuple[str, ...]], ...
] = (
    ("maker-untested", lambda: planned(("m", "MI300X", 4)), ()),
    ("precision-unsupported", in_bf16, ()),
    ("precision-unsupported", with_stage_precision, ()),
    ("fp8-unsupported", lambda: flagged(MIXED, "--fp8-format=hybrid"), MIXED_NCCL),
    (
        "fp8-unsupported",
        lambda: flagged(partial(planned, ("r", "RTX-4090", 1)), "--fp8-format=e4m3",
                        "--fp8-recipe=blockwise"), (),
    ),
    (
        "flags-missing",
        lambda: flagged(MIXED, "--tokenizer-type=Llama2Tokenizer"),
        MIXED_NCCL,
    ),
    ("flag-left-out", without_words, MIXED_NCCL),
    ("fp4-unsupported",
     lambda: flagged(partial(planned, ("h", "H100-80GB", 2)), "--fp4-format=e2m1"), ()),
    ("flash-attention-unsupported", lambda: flagged(TURING, "--attention-backend", "flash"), ()),
    ("flash-attention-untested",
     lambda: flagged(partial(planned, ("r", "RTX-5090", 1)), "--use-flash-attn"), ()),
    ("context-parallel-unsupported", on_older_cards, ()),
    ("grouped-gemm-unsupported", lambda: flagged(TURING, "--moe-grouped-gemm"), ()),
    ("arguments-depend-on-gpu",
     lambda: flagged(partial(planned, ("a", "H100-80GB", 2), ("b", "B200", 2)),
                     "--use-megatron-fsdp"),
     MIXED_NCCL),
    ("flag-refused", lambda: flagged(MIXED, "--optimizer-cpu-offload"), MIXED_NCCL),
    ("batches-undivided",
     lambda: flagged(UNLIKE, "--step-batch-size-schedule=0:2 1000:16"), MIXED_NCCL),
    ("connections-not-one", WIDE, ("b:CUDA_DEVICE_MAX_CONNECTIONS=8",)),
    ("connections-not-one", DIVIDED, ("a:CUDA_DEVICE_MAX_CONNECTIONS=8",)),
    ("connections-one", lambda: flagged(A100S, "--use-torch-fsdp2"),
     ("b:CUDA_DEVICE_MAX_CONNECTIONS=1",)),
    ("apex-needed", lambda: flagged(A100S, "--transformer-impl=local"), ()),
    ("flash-attention-unused",
     lambda: flagged(A100S, "--transformer-impl=local", "--attention-backend=flash",
                     "--no-persist-layer-norm", "--no-gradient-accumulation-fusion"), ()),
    ("sequence-parallel-unused", lambda: flagged(A100S, "--sequence-parallel"), ()),
    ("overlap-without-partner",
     lambda: flagged(A100S, "--overlap-param-gather", "--overlap-grad-reduce"), ()),
    ("overlap-without-partner",
     lambda: flagged(A100S, "--overlap-p2p-communication-warmup-flush"), ()),
    ("overlap-without-partner", lambda: flagged(WIDE, "--tp-comm-overlap"), ()),
    ("flags-exclude", lambda: flagged(A100S, "--train-samples=90"), ()),
    ("flags-exclude",
     lambda: flagged(A100S, "--lr-warmup-fraction=0.1", "--lr-warmup-iters=5"), ()),
    ("flags-exclude", lambda: flagged(A100S, "--swiglu", "--squared-relu"), ()),
    ("p2p-on-consumer-card", lambda: planned(("r", "RTX-4090", 4)), ("NCCL_P2P_DISABLE=0",)),
    ("collective-algorithm-open", MIXED, ("NCCL_PROTO=",)),
    ("collective-algorithm-differs", A100S, ("a:NCCL_ALGO=Ring", "b:NCCL_ALGO=Tree")),
    ("collective-algorithm-differs", A100S, ("a:NCCL_PROTO=LL",)),
    ("collective-algorithm-incomplete", A100S, ("NCCL_ALGO=allreduce:tree",)),
    ("fabric-differs", A100S, ("b:NCCL_IB_DISABLE=1",)),
    ("fabric-differs", A100S, ("b:NCCL_NET=Socket",)),
    ("fabric-across-sites", across_sites, ()),
    ("rendezvous-loopback", lambda: with_host(*A100S(), "a", "localhost"), ()),
    ("rendezvous-loopback", lambda: with_host(*A100S(), "b", "127.0.0.1"), ()),
    ("interface-inside-machine", A100S, ("NCCL_SOCKET_IFNAME=lo",)),
    ("interface-inside-machine", A100S, ("b:GLOO_SOCKET_IFNAME=docker0",)),
    ("interface-inside-machine", A100S, ("NCCL_SOCKET_IFNAME=^docker0",)),
    ("plan-not-for-cluster", of_another_cluster, ()),
    ("cluster-file-doubt", with_doubt, ()),
    ("plan-out-of-date",
     lambda: (replace(A100S()[0], inputs={"cluster": "0" * 64}), A100S()[1]), ()),
    ("memory-exceeded", lambda: on_smaller_memory(-0.05), ()),
    ("memory-tight", lambda: on_smaller_memory(0.01), ()),
    ("launch-refused", lambda: with_host(*A100S(), "a", "0.0.0.0"), ()),
    ("launch-refused", lambda: flagged(A100S, *OF_ANOTHER_JOB.split()), ()),
)  # fmt: skip


@pytest.mark.parametrize(
    ("id_", "job", "settings"), FAULTS, ids=[f"{i}-{f[0]}" for i, f in enumerate(FAULTS)]
)
def test_a_planted_fault_is_found_and_nothing_else(
    id_: str, job: Job, settings: tuple[str, ...]
) -> None:
    plan, cluster = job()
    fresh = id_ in ("rendezvous-loopback", "launch-refused")
    if fresh:  # the hash of the cluster follows its hosts
        plan = replace(plan, inputs={})
    findings = check_plan_on_cluster(plan, cluster, settings)
    refused = {"flag-refused"} if refused_options(plan) else set()
    assert {finding.id for finding in findings} == {id_} | refused
    assert all(finding.what and finding.where and finding.remedy for finding in findings)


def test_sequences_divided_by_stock_megatron_get_the_connections_that_it_asks_for() -> None:
    assert check_plan_on_cluster(*DIVIDED(), ()) == ()
    # With the overlap of experts' messages Megatron leaves the number to the user.
    overlapped = flagged(DIVIDED, "--overlap-moe-expert-parallel-comm")
    for settings in ((), ("CUDA_DEVICE_MAX_CONNECTIONS=32",)):
        assert "connections-not-one" not in {
            finding.id for finding in check_plan_on_cluster(*overlapped, settings)
        }


def interleaved() -> tuple[Plan, Cluster]:
    plan, cluster = with_width((("a", "A100-80GB", 2),), "tp1:4,tp1:4 @16")
    return with_interleaving(plan, 0, [(0, 2), (1, 2), (0, 2), (1, 2)]), cluster


@pytest.mark.parametrize(
    ("job", "more", "severity"),
    [
        (DIVIDED, (), "error"),
        (UNLIKE, (), "warning"),
        (interleaved, (), None),
        (interleaved, ("--no-overlap-p2p-communication",), "error"),
    ],
)
def test_overlap_in_warm_up_ends_only_jobs_of_stock_megatron_that_overlap_nothing(
    job: Job, more: tuple[str, ...], severity: str | None
) -> None:
    plan, cluster = flagged(job, "--overlap-p2p-communication-warmup-flush", *more)
    findings = check_plan_on_cluster(plan, cluster, ())
    found = [f.severity for f in findings if f.id == "overlap-without-partner"]
    assert found == ([] if severity is None else [severity])


def test_errors_come_first() -> None:
    plan, cluster = flagged(MIXED, "--fp8-format=hybrid")
    severities = [f.severity for f in check_plan_on_cluster(plan, cluster, ("NCCL_ALGO=",))]
    assert severities == sorted(severities)
    assert set(severities) == {"error", "warning"}


def test_a_bare_layout_is_refused() -> None:
    with pytest.raises(PlanFormatError, match="names no devices"):
        make_job(plan_from_layout(parse_layout("tp1:8 @4x1")), A100S()[1])


@pytest.mark.parametrize("left_out", ["docker0,lo", "lo", "l", "=docker0,lo"])
def test_interfaces_that_nccl_is_to_leave_out_may_end_inside_the_machine(left_out: str) -> None:
    assert check_plan_on_cluster(*A100S(), (f"NCCL_SOCKET_IFNAME=^{left_out}",)) == ()


@pytest.mark.parametrize("left_out", ["docker0", "docker,virbr", "=l", "lo0,loop"])
def test_nccl_leaves_loopback_out_only_where_it_is_told(left_out: str) -> None:
    """Its own `^docker,lo` holds where the variable is not set."""
    found = check_plan_on_cluster(*A100S(), (f"b:NCCL_SOCKET_IFNAME=^{left_out}",))
    assert [f.id for f in found] == ["interface-inside-machine"]
    assert f"NCCL_SOCKET_IFNAME=^{left_out},lo on b" in found[0].remedy


@pytest.mark.parametrize("text", ["NCCL_ALGO", "c:NCCL_ALGO=Ring", "a b=1", "=1"])
def test_a_setting_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--env"):
        check_plan_on_cluster(*A100S(), (text,))
