"""Machines with several NICs: prices by hand, the formula beside the simulation, the search."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.bounds.estimate import workload_of
from megatron_hetero.cluster.nics import Nics
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.seconds import boundary_time
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner import plan_cluster
from megatron_hetero.schedule.estimate import estimate_plan
from megatron_hetero.schedule.simulator.shared_paths import queued
from megatron_hetero.schedule.simulator.step import simulate_plan
from tests.cost.builders import FAST, INSIDE, SLOW, make_cluster, make_workload
from tests.schedule.simulator.test_step import placed, three_nodes
from tests.schedule.test_exchange_formula import plans

LATENCY_S = 1e-3
ONE = 1e9


def several(cluster: Cluster, num: int, each: float = ONE, network: float = ONE) -> Cluster:
    """Machines of four GPUs with `num` NICs each, as their file is read."""
    near = tuple(gpu * num // 4 for gpu in range(4))
    nics = Nics(each, near)
    nodes = tuple(
        replace(n, nics=nics, uplink_bytes_per_s=nics.total_bytes_per_s) for n in cluster.nodes
    )
    total = min(num * network, nics.total_bytes_per_s)
    links = {
        pair: replace(link, bytes_per_s=total, nic_bytes_per_s=network)
        for pair, link in cluster.node_links.items()
    }
    return replace(cluster, nodes=nodes, node_links=links)


def two(num: int, **speeds: float) -> Cluster:
    made = make_cluster(("a", FAST, 4), ("b", FAST, 4), between=Link(ONE, LATENCY_S))
    return several(made, num, **speeds)


def devices(node: str, *indices: int) -> list[Device]:
    return [Device(node, index) for index in indices]


@pytest.mark.parametrize(
    ("num", "senders", "receivers", "seconds"),
    [
        (4, (0,), (0,), 8.0),  # one pair of GPUs: one NIC
        (4, (0, 1, 2, 3), (0, 1, 2, 3), 2.0),  # four side by side
        (4, (0, 1), (0, 1, 2, 3), 4.0),  # of two senders each has half
        (4, (0, 1, 2, 3), (2,), 8.0),  # all into one
        (2, (0, 1), (0, 1), 8.0),  # both are near the same NIC
        (2, (0, 2), (1, 3), 4.0),
        (1, (0, 1, 2, 3), (0, 1, 2, 3), 8.0),
    ],
)
def test_boundaries_by_hand(
    num: int, senders: tuple[int, ...], receivers: tuple[int, ...], seconds: float
) -> None:
    """8 GB over NICs of 1 GB/s."""
    found = boundary_time(two(num), devices("a", *senders), devices("b", *receivers), 8e9, True)
    assert found.serialisation_s == pytest.approx(seconds)
    assert found.on_path_s == pytest.approx(8.0 / num)
    assert found.latency_s == pytest.approx(LATENCY_S)


def test_a_network_slower_than_the_nics_holds_up_each_pair() -> None:
    slower = two(4, each=2 * ONE)
    found = boundary_time(slower, devices("a", 0), devices("b", 0), 8e9, True)
    assert found.serialisation_s == pytest.approx(8.0)
    whole = boundary_time(slower, devices("a", 0, 1, 2, 3), devices("b", 0, 1, 2, 3), 8e9, True)
    assert whole.serialisation_s == pytest.approx(2.0)


def crossing(second: str) -> Plan:
    """Two pipelines from a to b; the second begins on GPU `second` of a."""
    sizes = {"hidden_size": 2048, "seq_length": 2048, "max_position_embeddings": 2048}
    return placed("tp1:2,tp1:2 @8 | tp1:2,tp1:2 @8", ["a:0", "b:0"], [second, "b:3"], **sizes)


def test_pipelines_over_unlike_nics_do_not_wait_for_each_other() -> None:
    cluster = two(2, each=1e8, network=1e8)
    shared, apart = (estimate_plan(crossing(gpu), cluster) for gpu in ("a:1", "a:2"))
    alone = estimate_plan(crossing("a:2"), two(4, each=1e8, network=1e8))
    assert max(shared.replica_times_s) > 1.5 * max(apart.replica_times_s)
    assert max(apart.replica_times_s) == pytest.approx(max(alone.replica_times_s))
    for gpu, found in (("a:1", shared), ("a:2", apart)):
        simulated = simulate_plan(crossing(gpu), cluster)
        assert found.step_time_s == pytest.approx(simulated.step_time_s, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(plans(), st.sampled_from([2, 4]), st.sampled_from([2e8, 1e9]), st.booleans())
def test_the_formula_of_the_exchange_is_the_simulation(
    plan: Plan, num: int, each: float, is_slower: bool
) -> None:
    cluster = several(three_nodes(), num, each, each * (0.8 if is_slower else 1.0))
    found = simulate_plan(plan, cluster, is_stock=False)
    placement = placement_of(plan, cluster)
    costs = CostModel(cluster, workload_of(plan)).sharded_as(placement)
    cost = queued(costs, placement, costs.placement(placement))
    if cost.pipelines_s == pytest.approx(found.pipelines_s, rel=1e-6):
        assert cost.step_time_s == pytest.approx(found.step_time_s, rel=1e-6)
    else:  # a message waits behind another replica's gradients, which the formula does not see
        assert found.pipelines_s > cost.pipelines_s
    shared = several(three_nodes(), 1, each, each * (0.8 if is_slower else 1.0))
    assert found.step_time_s <= simulate_plan(plan, shared, is_stock=False).step_time_s * 1.0001


def test_one_nic_is_an_uplink_and_all_gpus_of_the_machine_share_it() -> None:
    """What a file without `nics` has always said of such a machine."""
    plain = make_cluster(("a", FAST, 4), ("b", SLOW, 4), between=Link(ONE, LATENCY_S))
    nodes = tuple(replace(n, uplink_bytes_per_s=ONE) for n in plain.nodes)
    job = make_workload(num_layers=8, global_batch_size=16, seq_length=1024)
    uplink = plan_cluster(replace(plain, nodes=nodes), job, strategy="columns")
    one = plan_cluster(several(plain, 1), job, strategy="columns")
    assert one.estimates is not None and uplink.estimates is not None
    assert one.replicas == uplink.replicas
    assert one.estimates.step_time_s == pytest.approx(uplink.estimates.step_time_s)


@pytest.mark.parametrize("each", [pytest.param(5e8, marks=pytest.mark.slow), 1e9])
def test_more_nics_are_faster_and_the_bound_holds(each: float) -> None:
    plain = make_cluster(("a", FAST, 4), ("b", SLOW, 4), inside=INSIDE)
    job = make_workload(num_layers=8, hidden_size=2048, global_batch_size=64, seq_length=1024)
    found = []
    for num in (1, 2, 4):
        plan = plan_cluster(several(plain, num, each, each), job, strategy="columns")
        estimates = plan.estimates
        assert estimates is not None and estimates.bound_s is not None
        assert estimates.bound_s <= estimates.step_time_s
        found.append(estimates.step_time_s)
        bare = replace(plan, estimates=None)
        more = [estimate_plan(bare, several(plain, n, each, each)).step_time_s for n in (1, 2, 4)]
        assert more[2] <= 1.0001 * more[1] <= 1.0002 * more[0]
        assert estimates.step_time_s == pytest.approx(more[(1, 2, 4).index(num)], rel=0.001)
    assert found[2] < 0.9 * found[0]


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_the_replicas_of_two_machines_exchange_over_all_their_nics(width: int) -> None:
    """16 GPUs with eight NICs a machine, whatever the width of their replicas: eight times as fast
    as over one NIC, less what the links inside a machine take.  NCCL spreads a ring over the NICs
    near all its GPUs."""
    plain = make_cluster(("a", FAST, 8), ("b", FAST, 8), inside=Link(450e9, 0.0))
    count = 8 // width
    name = f"tp{width}:4 @8 | " * (2 * count)
    groups = [range(width * i, width * (i + 1)) for i in range(count)]
    ends = [[f"{node}:{gpu}" for gpu in group] for node in "ab" for group in groups]
    plan = placed(name.removesuffix(" | "), *ends)
    found = []
    for num in (1, 8):
        nics = Nics(50e9, tuple(gpu * num // 8 for gpu in range(8)))
        nodes = tuple(
            replace(n, nics=nics, uplink_bytes_per_s=nics.total_bytes_per_s) for n in plain.nodes
        )
        links = {
            pair: replace(link, bytes_per_s=num * 50e9, latency_s=0.0, nic_bytes_per_s=50e9)
            for pair, link in plain.node_links.items()
        }
        cluster = replace(plain, nodes=nodes, node_links=links)
        placement = placement_of(plan, cluster)
        costs = CostModel(cluster, workload_of(plan))
        found.append(costs.sync_s(placement, plan.workload.model.vocab_size))
        simulated = simulate_plan(plan, cluster, is_stock=False)
        estimated = estimate_plan(plan, cluster)
        assert estimated.step_time_s == pytest.approx(simulated.step_time_s, rel=1e-3)
    assert found[0] / found[1] == pytest.approx(8, rel=0.15)
