"""Price lists of one job under other settings: what they are of, and that each is made once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.memory.states import EVERY_DEVICE, StateHolders
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.unit_prices import UnitPrices
from megatron_hetero.cost.work.profile import MeasuredType, Profile
from tests.cost.builders import FAST, OLD, SLOW, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 4), between=Link(1e9, 1e-3))
WORKLOAD = make_workload(num_layers=4, global_batch_size=8, seq_length=1024)
SHARDED = replace(WORKLOAD, training=replace(WORKLOAD.training, use_distributed_optimizer=True))
ACTIVATION = 1024 * 512 * 2


def prices(workload: object = WORKLOAD) -> UnitPrices:
    return UnitPrices(CLUSTER, workload)  # type: ignore[arg-type]


def test_a_variant_is_a_job_of_those_settings() -> None:
    own = prices()
    changed = own.variant(micro_batch_size=4, recompute="full")
    training = changed.workload.training
    assert (training.micro_batch_size, training.recompute) == (4, "full")
    assert changed.activation_bytes == 4 * own.activation_bytes == 4 * ACTIVATION
    node = CLUSTER.nodes[0]
    other = UnitPrices(CLUSTER, changed.workload)
    assert changed.pieces(node, 2, 1024) == other.pieces(node, 2, 1024)
    assert changed.memory(node, 2, True, False, 3, 1024) == other.memory(
        node, 2, True, False, 3, 1024
    )
    assert own.workload == WORKLOAD  # as it was


def test_the_jobs_own_settings_are_no_variant_and_others_are_made_once() -> None:
    own = prices()
    assert own.variant() is own
    assert own.variant(micro_batch_size=1, recompute="none", holders=EVERY_DEVICE) is own
    two = own.variant(micro_batch_size=2)
    assert own.variant(micro_batch_size=2) is two
    assert two.variant(micro_batch_size=1).workload == WORKLOAD


def test_states_are_divided_as_replicas_divide_them() -> None:
    def replica(*names: str) -> PlacedReplica:
        return PlacedReplica(tuple(PlacedStage((Device(n[0], int(n[1])),), 2) for n in names), 4)

    placement = Placement((replica("a0", "b0", "b1"), replica("a1")))
    own = prices()
    assert own.sharded_as(placement) is own  # each device keeps all of its states
    assert own.sharded_among(3) is own
    divided = prices(SHARDED)
    # Two replicas; tied words on both ends of one and on the only stage of the other.
    assert divided.sharded_as(placement).holders == StateHolders(2, 3)
    assert divided.sharded_among(3).holders == StateHolders(3, 6)


@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_more_holders_keep_less_each(num_replicas: int) -> None:
    node = CLUSTER.nodes[0]
    one, more = (
        prices(SHARDED).sharded_among(n).memory(node, 1, False, False, 1, 1024).per_layer
        for n in (1, num_replicas)
    )
    assert more["optimizer"] == -(-one["optimizer"] // num_replicas)
    assert more["weights"] == one["weights"]


def test_layers_of_unlike_kinds_are_bounded_by_their_least() -> None:
    own = prices()
    assert own.of_least_layers() is own
    mixed = make_workload(
        num_layers=4,
        num_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=512,
        moe_layer_freq=(0, 1, 1, 1),
        sequence_parallel=True,
    )
    full = prices(mixed)
    least = full.of_least_layers()
    assert least.workload.model == mixed.model.least
    node = CLUSTER.nodes[0]
    for kind in full.pieces(node, 1, 1024).kinds:
        assert least.pieces(node, 1, 1024).layer.total_s <= kind.layer.total_s
    # The host of a profile is theirs too, however slow that of the catalogue.
    slow = make_cluster(("a", replace(FAST, launch_s=1.0), 4))
    profile = Profile({}, gpus={FAST.name: MeasuredType(launch_s=1e-5)})
    measured = UnitPrices(slow, mixed, profile)
    least_s = measured.of_least_layers().pieces(slow.nodes[0], 1, 1024).layer.total_s
    for kind in measured.pieces(slow.nodes[0], 1, 1024).kinds:
        assert least_s <= kind.layer.total_s < 1.0


def test_a_change_back_is_the_jobs_own_prices_again() -> None:
    """Whatever was asked for before, and in whatever order."""
    own = prices(SHARDED)
    changes = ({"micro_batch_size": 2}, {"recompute": "full"}, {"holders": StateHolders(2, 3)})
    back = {"micro_batch_size": 1, "recompute": "none", "holders": EVERY_DEVICE}
    node = CLUSTER.nodes[0]
    expected = own.pieces(node, 1, 1024), own.memory(node, 1, True, False, 2, 1024)
    for one in changes:
        for other in changes:
            there = own.variant(**one).variant(**other)
            assert own.variant(**{**one, **other}).workload == there.workload  # type: ignore[arg-type]
            again = there.variant(**back)  # type: ignore[arg-type]
            assert again.workload == SHARDED and again.holders == EVERY_DEVICE
            found = again.pieces(node, 1, 1024), again.memory(node, 1, True, False, 2, 1024)
            assert found == expected


def test_a_group_has_the_prices_of_its_own_precision() -> None:
    mixed = replace(WORKLOAD, training=replace(WORKLOAD.training, mixes_precisions=True))
    cluster = make_cluster(("a", FAST, 1), ("b", OLD, 1))
    own = UnitPrices(cluster, mixed)
    assert own.on([FAST]) is own
    in_fp16 = own.on([FAST, OLD])
    assert in_fp16.workload.training.precision == "fp16"
    assert in_fp16 is own.on_devices(cluster.devices) is own.variant(precision="fp16")
    given = PlacedStage(cluster.devices[:1], 4, precision="fp32")
    assert own.of_stage(given).workload.training.precision == own.own_precision(given) == "fp32"
    # Without the flag every group has the job's precision, on whatever GPUs.
    plain = UnitPrices(cluster, WORKLOAD)
    assert plain.on_devices(cluster.devices) is plain
