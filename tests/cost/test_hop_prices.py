"""Prices of boundaries, and that like is priced once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cost.hop_prices import BoundaryPrices
from megatron_hetero.cost.pipeline import steady_period_s
from megatron_hetero.cost.placement import PlacedStage
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

CLUSTER = make_cluster(("a", FAST, 4), ("b", SLOW, 4), between=Link(1e9, 1e-3))
WORKLOAD = make_workload(num_layers=4, global_batch_size=8, seq_length=1024)
ACTIVATION = 1024 * 512 * 2


def devices(name: str, *indices: int) -> tuple[Device, ...]:
    return tuple(Device(name, i) for i in indices)


def prices() -> BoundaryPrices:
    return BoundaryPrices(CLUSTER, WORKLOAD)


def test_like_boundaries_are_priced_once() -> None:
    own = prices()
    assert own.hop(devices("a", 0), devices("b", 0)) is own.hop(devices("a", 3), devices("b", 2))


def test_activations_by_hand() -> None:
    assert prices().activation_bytes == ACTIVATION
    wide = make_workload(seq_length=1024, micro_batch_size=3, precision="fp32")
    assert BoundaryPrices(CLUSTER, wide).activation_bytes == 3 * 1024 * 512 * 4


def test_hops_by_hand() -> None:
    hop = prices().hop(devices("a", 0), devices("b", 0))
    assert hop.serialisation_s == pytest.approx(ACTIVATION / 1e9)
    assert hop.latency_s == pytest.approx(1e-3)
    stage = PlacedStage(devices("a", 0), 2), PlacedStage(devices("b", 0), 2)
    assert prices().stage_hop(*stage) == hop


def test_sends_keep_no_stage_from_computing() -> None:
    groups = [devices("a", 0), devices("b", 0), devices("b", 1)]
    assert prices().send_loads_s(groups) == (0.0, 0.0, 0.0)

    class Loaded(BoundaryPrices):
        """Prices under which each boundary takes 1 s of the sender and 2 s of the receiver."""

        def hop_loads_s(self, senders: object, receivers: object) -> tuple[float, float]:
            return 1.0, 2.0

    assert Loaded(CLUSTER, WORKLOAD).send_loads_s(groups) == (1.0, 3.0, 2.0)
    assert Loaded(CLUSTER, WORKLOAD).send_loads_s(groups[:1]) == (0.0,)


@given(st.lists(st.floats(1e-4, 1e-2), min_size=3, max_size=3))
def test_quick_times_by_hand(times_s: list[float]) -> None:
    groups = [devices("a", 0), devices("a", 1), devices("b", 0)]
    own = prices()
    inside, far = 2 * (ACTIVATION / 100e9 + 3e-6), 2 * (ACTIVATION / 1e9 + 1e-3)
    fill_s, period_s = own.quick_times_s(times_s, groups)
    assert fill_s == pytest.approx(sum(times_s) + inside + far)
    expected = steady_period_s(times_s, [inside, far], ACTIVATION / 1e9)
    assert period_s == pytest.approx(expected)


def test_one_stage_has_no_hops() -> None:
    assert prices().quick_times_s([2.0], [devices("a", 0)]) == (2.0, 2.0)
