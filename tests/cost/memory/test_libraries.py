from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.catalogue import gpu_type
from megatron_hetero.cluster.limits import Limits
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory.libraries import (
    CONTEXT_BYTES,
    KeptFree,
    communicators_bytes,
    inward_communicators,
    kept_free,
    margin_bytes,
    memory_kind,
    num_channels,
    torch_workspace_bytes,
)
from megatron_hetero.cost.work.profile import MeasuredType, Profile
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.communication.communicators import model_communicators
from megatron_hetero.plan.layout import parse_layout

MIB = 1 << 20
OLDER_WORKSPACES = 2 * (8 * MIB + 128 * 1024) + 4 * MIB
"""torch's two and Transformer Engine's, before Hopper."""
NVLINK, BRIDGE, BUS = Link(300e9, 1e-6), Link(56e9, 2e-6), Link(24e9, 5e-6)


def node(gpu: str = "A100-80GB", num_gpus: int = 4, link: Link = NVLINK) -> Node:
    return Node("a", gpu_type(gpu), num_gpus, "main", "a", link)


def cluster(*nodes: Node, reserve: int | None = None) -> Cluster:
    return Cluster(nodes, {}, Limits(memory_reserve_bytes=reserve))


@pytest.mark.parametrize(
    "link, num_gpus, channels",
    [(NVLINK, 8, 24), (BRIDGE, 2, 4), (BUS, 4, 2), (Link(450e9, 1e-6), 8, 24), (NVLINK, 1, 2)],
)
def test_channels_follow_the_links(link: Link, num_gpus: int, channels: int) -> None:
    assert num_channels(node(num_gpus=num_gpus, link=link)) == channels


def test_a_group_takes_about_what_was_measured_on_four_a100() -> None:
    """NVIDIA/nccl#964: 544 MB for a group of two, 688 MB for three and four."""
    others = communicators_bytes(node(), 1, 0)
    two, four = (communicators_bytes(node(), width, 0) - others for width in (2, 4))
    assert 0.8 * 544 < two / 1e6 < 544
    assert 0.9 * 688 < four / 1e6 < 1.02 * 688
    assert communicators_bytes(node(), 3, 0) == four + others


def test_each_communicator_of_messages_adds_a_connection() -> None:
    one, two = (communicators_bytes(node(link=BUS), 1, n) for n in (1, 2))
    assert two - one == one - communicators_bytes(node(link=BUS), 1, 0) > 0


def test_a_given_reserve_covers_everything() -> None:
    assert kept_free(cluster(node(), reserve=5), node(), 2, 2) == KeptFree(0, 5)
    assert kept_free(cluster(node(), reserve=0), node(), 2, 2) == KeptFree(0, 0)


def test_without_one_libraries_and_a_margin_are_kept() -> None:
    alone = node("RTX-3090", 1)
    kept = kept_free(cluster(alone), alone, 1, 0)
    assert kept.libraries == CONTEXT_BYTES + OLDER_WORKSPACES
    assert kept.reserve is None and kept.reserve_beside(0) == 1_500_000_000
    # On a machine with others there is somebody to talk to.
    other = replace(alone, name="b", host="b")
    assert kept_free(cluster(alone, other), alone, 1, 1).libraries > kept.libraries


def test_the_margin_is_the_largest_tensor_and_a_gigabyte() -> None:
    assert margin_bytes(2_000_000_000) == 3_000_000_000
    assert margin_bytes(400_000_000) == 1_500_000_000
    assert KeptFree(0, 5).reserve_beside(2_000_000_000) == 5


def test_hopper_has_larger_workspaces() -> None:
    h100, a100 = node("H100-80GB", 1), node("A100-80GB", 1)
    difference = kept_free(cluster(h100), h100, 1, 0).libraries
    difference -= kept_free(cluster(a100), a100, 1, 0).libraries
    assert difference == 3 * 32 * MIB + 1024 - OLDER_WORKSPACES


def test_torch_counts_a_workspace_for_each_of_two_threads() -> None:
    assert torch_workspace_bytes(gpu_type("H200")) == 64 * MIB
    assert torch_workspace_bytes(gpu_type("L40S")) == 2 * (8 * MIB + 128 * 1024)


def test_measured_bytes_stand_for_the_constants() -> None:
    """A communicator of two ranks has two connections on each channel."""
    measured = MeasuredType(context_bytes=500 * MIB, communicator_bytes=60 * MIB)
    profile = Profile({}, gpus={"A100-80GB": measured})
    machine, other = node(), replace(node("RTX-3090"), name="b", host="b")
    many = cluster(machine, other)
    # 3 in a group of four, 3 for the gradients, 3 for the job; 2 of messages on 2 of 24 channels.
    libraries = kept_free(many, machine, 4, 2, profile).libraries
    assert (
        libraries == 500 * MIB + OLDER_WORKSPACES + 30 * MIB * (3 + 3 + 3) + 30 * MIB * 2 * 2 // 24
    )
    assert kept_free(many, other, 4, 2, profile) == kept_free(many, other, 4, 2)
    assert kept_free(many, machine, 4, 2, Profile({})) == kept_free(many, machine, 4, 2)
    given = cluster(machine, reserve=5)
    assert kept_free(given, machine, 4, 2, profile) == KeptFree(0, 5)


@pytest.mark.parametrize(
    "measured, due",
    [
        (MeasuredType(context_bytes=CONTEXT_BYTES + 7), 7),
        # Three connections for the gradients and three for the whole job.
        (MeasuredType(communicator_bytes=50 * MIB), 150 * MIB - communicators_bytes(node(), 1, 0)),
        (MeasuredType(launch_s=1e-5), 0),
    ],
)
def test_what_was_not_measured_keeps_its_constant(measured: MeasuredType, due: int) -> None:
    profile = Profile({}, gpus={"A100-80GB": measured})
    found, usual = (kept_free(cluster(node()), node(), 1, 0, p) for p in (profile, None))
    assert found == replace(usual, libraries=usual.libraries + due)


def test_kinds_differ_where_the_memory_does() -> None:
    assert memory_kind(node()) == memory_kind(replace(node(), name="b"))
    assert memory_kind(node()) != memory_kind(node(link=BUS))


@pytest.mark.parametrize("layout", ["tp1:1,tp1:1 @8", "tp1:1,tp1:1,tp1:1,tp1:1,tp1:1 @9"])
def test_communicators_of_messages_are_those_that_the_runtime_makes(layout: str) -> None:
    plan = plan_from_layout(parse_layout(layout))
    made = [one for one in model_communicators(plan) if one.boundary is not None]
    depth = len(plan.replicas[0].stages)
    for stage in range(depth):
        inward = [one for one in made if one.boundary == stage - (one.use == "forward")]
        counted = inward_communicators(stage == 0, stage == depth - 1, depth - stage)
        assert counted == len(inward), stage
