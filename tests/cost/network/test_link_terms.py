"""The terms of GenModel (arXiv 2409.04202): what adding costs, and many senders to one receiver."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest

from megatron_hetero.cluster.node_links import Incast, Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.collectives import (
    context_parallel_times,
    end_exchanges,
    ring_all_gather_s,
    ring_all_reduce_s,
    ring_reduce_scatter_s,
)
from megatron_hetero.cost.network.link_terms import FanIn
from megatron_hetero.cost.network.seconds import (
    boundary_time,
    slowest_link,
)
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.sync.gradients import GradientExchangePrices
from megatron_hetero.plan.build import canonical_hosts
from megatron_hetero.planner import plan_cluster
from megatron_hetero.planner.advise.additions import additions
from megatron_hetero.planner.problem import make_problem
from megatron_hetero.planner.shapes.kinds import kinds_of
from megatron_hetero.report.what_if import variations
from tests.cost.builders import (
    BETWEEN,
    FAST,
    INSIDE,
    SLOW,
    bytes_between_nodes,
    estimate_plan,
    make_cluster,
    make_workload,
    place,
)

MODEL = make_workload(tied_embeddings=False, position_embedding="rope").model
LATENCY, BANDWIDTH, MEMORY = Link(inf, 1.0), Link(1.0, 0.0), Link(inf, 0.0, 0.0, 1.0)
"""Links that count rounds, bytes, and memory accesses."""


def nodes_of_one(num: int, between: Link) -> Cluster:
    return make_cluster(*((f"n{i}", FAST, 1) for i in range(num)), between=between)


def replicas_on(cluster: Cluster, width: int = 1) -> Placement:
    """A replica of one stage on every `width` GPUs."""
    groups = [
        tuple(Device(node.name, first + i) for i in range(width))
        for node in cluster.nodes
        for first in range(0, node.num_gpus, width)
    ]
    return Placement(tuple(PlacedReplica((PlacedStage(group, 4),), 1) for group in groups))


def per_byte(
    cluster: Cluster, weight_bytes: int | None = None, width: int = 1
) -> tuple[float, float]:
    """(longest, all together) of the seconds for which the gradients of the embedding take paths,
    and then until they can be used, for each byte."""
    exchange = GradientExchangePrices(cluster, MODEL, 4, weight_bytes)
    flow = exchange.groups(replicas_on(cluster, width), 1024)[-1].gradients
    num_bytes = 1024 * 512 * 4
    after_s = flow.latency_s
    return (
        (float(flow.seconds.max()) + after_s) / num_bytes,
        (float(flow.seconds.sum()) + after_s) / num_bytes,
    )


@pytest.mark.parametrize("num", [2, 4, 8])
def test_a_ring_has_genmodels_rounds_bytes_and_accesses(num: int) -> None:
    counted = [ring_all_reduce_s(1.0, num, link) for link in (LATENCY, BANDWIDTH, MEMORY)]
    assert counted == pytest.approx([2 * (num - 1), 2 * (num - 1) / num, 3 * (num - 1) / num])
    # The all-reduce of gradients, over hops instead of a slowest link; adding is in no other pass.
    of_bytes, of_memory = (per_byte(nodes_of_one(num, link))[0] for link in (BANDWIDTH, MEMORY))
    assert [of_bytes, of_memory] == pytest.approx([2 * (num - 1) / num, 3 * (num - 1) / num])
    exchange = GradientExchangePrices(nodes_of_one(num, LATENCY), MODEL, 4, None)
    (*_, embedding) = exchange.groups(replicas_on(nodes_of_one(num, LATENCY)), 1024)
    assert embedding.gradients.latency_s == 2 * (num - 1)


@pytest.mark.parametrize("num", [2, 4, 8])
def test_parts_straight_to_owners_are_added_in_one_pass(num: int) -> None:
    """GenModel's co-located parameter server: its reduce-scatter half is ours, 1 round of (n - 1)/n
    of the bytes into every receiver and n + 1 accesses of an n-th; its other half is a mirror."""
    _, of_bytes = per_byte(nodes_of_one(num, BANDWIDTH), 2)
    assert of_bytes / num == pytest.approx((num - 1) / num)
    assert per_byte(nodes_of_one(num, MEMORY), 2)[0] == pytest.approx((num + 1) / num)
    flow = GradientExchangePrices(nodes_of_one(num, LATENCY), MODEL, 4, 2)
    (*_, embedding) = flow.groups(replicas_on(nodes_of_one(num, LATENCY)), 1024)
    assert embedding.gradients.latency_s == 1
    assert embedding.weights is not None and embedding.weights.latency_s == num - 1
    # The new weights go round in rings, in which nobody adds.
    (*_, memory) = GradientExchangePrices(nodes_of_one(num, MEMORY), MODEL, 4, 2).groups(
        replicas_on(nodes_of_one(num, MEMORY)), 1024
    )
    assert memory.weights is not None and not memory.weights.seconds.any()
    assert memory.weights.latency_s == 0
    cluster = nodes_of_one(num, Link(1.0, 0.0, incast=Incast(1, 1.0)))
    link = cluster.node_links["n0", "n1"]
    assert FanIn(cluster, cluster.devices).num_senders("n0", "n1", link) == num - 1


def test_one_pass_is_cheaper_than_a_ring_from_three_on() -> None:
    ring, owners = (
        {n: per_byte(nodes_of_one(n, MEMORY), weight)[0] for n in (2, 3, 8)} for weight in (None, 2)
    )
    assert ring[2] == owners[2] == pytest.approx(3 / 2)
    assert owners[3] < ring[3] and owners[8] == pytest.approx(9 / 8) and ring[8] == 21 / 8


def test_every_rank_of_a_wide_holder_adds_its_own_part() -> None:
    """Pairs of two nodes: the card carries all, but each rank adds half of it."""
    cluster = make_cluster(("a", FAST, 2), ("b", FAST, 2), between=MEMORY, inside=Link(1e99, 0.0))
    assert per_byte(cluster, width=2)[0] == pytest.approx(3 / 2 / 2, rel=0.01)
    assert per_byte(cluster, 2, width=2)[0] == pytest.approx(3 / 2 / 2, rel=0.01)


def test_gathering_adds_nothing() -> None:
    assert ring_all_gather_s(1e9, 4, MEMORY) == 0
    added_s = ring_reduce_scatter_s(1e9, 4, MEMORY)
    assert added_s == pytest.approx(3 * 3 / 4 * 1e9) == ring_all_reduce_s(1e9, 4, MEMORY)
    # Sequence parallelism gathers once more for the head; what it reduces is the same.
    assert end_exchanges(1e9, 4, MEMORY, False, 0) == (added_s, 0)
    assert end_exchanges(1e9, 4, MEMORY, True, 0) == (added_s, 0)
    # Keys and values go round without being added to; their gradients are sums.
    assert context_parallel_times(1e9, 4, MEMORY, True) == (0, added_s)
    assert context_parallel_times(1e9, 4, MEMORY, False) == (0, added_s)


def test_the_slowest_link_of_a_group_adds_slowest() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1), ("c", FAST, 1))
    links = dict(cluster.node_links)
    links["b", "c"] = replace(BETWEEN, reduce_bytes_per_s=1e10, incast=Incast(1, 1.0))
    links["c", "a"] = replace(BETWEEN, reduce_bytes_per_s=4e10)
    found = slowest_link(replace(cluster, node_links=links), cluster.devices)
    assert found == replace(BETWEEN, reduce_bytes_per_s=1e10)


def seconds_of_owners(cluster: Cluster) -> dict[tuple[str, str], float]:
    exchange = GradientExchangePrices(cluster, MODEL, 4, 2)
    flow = exchange.groups(replicas_on(cluster), 1024)[-1].gradients
    names = [node.name for node in cluster.nodes]
    return {
        (names[path // len(names)], names[path % len(names)]): seconds
        for path, seconds in zip(flow.paths.tolist(), flow.seconds.tolist(), strict=True)
        if path < len(names) ** 2
    }


def test_every_sender_beyond_those_that_a_card_bears_slows_all() -> None:
    plain = seconds_of_owners(nodes_of_one(6, Link(1e9, 0.0)))
    for senders, factor in ((1, 1 + 4 * 0.25), (3, 1 + 2 * 0.25), (5, 1.0), (9, 1.0)):
        link = Link(1e9, 0.0, incast=Incast(senders, 0.25))
        found = seconds_of_owners(nodes_of_one(6, link))
        assert found == pytest.approx({path: factor * s for path, s in plain.items()})
    # A card that is shared fairly takes n - 1 parts one after the other.
    shared = seconds_of_owners(nodes_of_one(6, Link(1e9, 0.0, incast=Incast(1, 1.0))))
    assert shared["n0", "n1"] == pytest.approx(5 * plain["n0", "n1"])


def test_links_of_another_incast_are_counted_apart() -> None:
    """Four nodes on two sites: a node hears one neighbour, and two from far away."""
    near, far = Link(1e9, 0.0, incast=Incast(1, 1.0)), Link(1e8, 0.0, incast=Incast(1, 0.5))
    cluster = nodes_of_one(4, near)
    site = {"n0": 0, "n1": 0, "n2": 1, "n3": 1}
    links = {(a, b): near if site[a] == site[b] else far for a, b in cluster.node_links}
    found = seconds_of_owners(replace(cluster, node_links=links))
    plain = seconds_of_owners(replace(cluster, node_links=links).without_link_terms)
    assert found["n0", "n1"] == plain["n0", "n1"]
    assert found["n0", "n2"] == pytest.approx(1.5 * plain["n0", "n2"])


def test_the_gpus_of_a_node_are_one_sender_to_another_and_several_among_each_other() -> None:
    incast = Incast(1, 1.0)
    plain = make_cluster(("a", FAST, 4), ("b", FAST, 1))
    crowded = make_cluster(
        ("a", FAST, 4),
        ("b", FAST, 1),
        between=replace(BETWEEN, incast=incast),
        inside=replace(INSIDE, incast=incast),
    )
    assert seconds_of_owners(crowded) == seconds_of_owners(plain)
    ports = [
        GradientExchangePrices(cluster, MODEL, 4, 2)
        .groups(replicas_on(cluster), 1024)[-1]
        .gradients
        for cluster in (plain, crowded)
    ]
    is_port = ports[0].paths >= len(plain.nodes) ** 2
    assert ports[1].seconds[is_port] == pytest.approx(3 * ports[0].seconds[is_port])


def test_rings_have_one_sender() -> None:
    link = replace(BETWEEN, incast=Incast(1, 10.0))
    plain, crowded = (
        GradientExchangePrices(nodes_of_one(4, k), MODEL, 4, None).alone_s(
            replicas_on(nodes_of_one(4, k)), 1024
        )
        for k in (BETWEEN, link)
    )
    assert crowded == plain


def test_pieces_of_many_senders_meet_at_the_port_of_one_receiver() -> None:
    crowded = replace(INSIDE, incast=Incast(2, 0.1))
    cluster, plain = (make_cluster(("a", FAST, 8), inside=k) for k in (crowded, INSIDE))

    def seconds(cluster: Cluster, num_senders: int, num_receivers: int) -> float:
        senders = [Device("a", i) for i in range(num_senders)]
        receivers = [Device("a", num_senders + i) for i in range(num_receivers)]
        return boundary_time(cluster, senders, receivers, 1e9, True).serialisation_s

    for num_senders, num_receivers, factor in (
        (4, 1, 1.2), (6, 2, 1.1), (4, 2, 1.0), (1, 4, 1.0), (4, 4, 1.0),
    ):  # fmt: skip
        alone_s = seconds(plain, num_senders, num_receivers)
        assert seconds(cluster, num_senders, num_receivers) == pytest.approx(factor * alone_s)


def test_groups_over_nodes_meet_at_the_card_of_one() -> None:
    link = replace(BETWEEN, incast=Incast(1, 0.5))
    cluster, plain = (
        make_cluster(("a", FAST, 1), ("b", FAST, 1), ("c", FAST, 2), between=k)
        for k in (link, BETWEEN)
    )
    senders, receivers = [Device("a", 0), Device("b", 0)], [Device("c", 0), Device("c", 1)]
    there = [boundary_time(k, senders, receivers, 1e9, True) for k in (cluster, plain)]
    assert there[0].serialisation_s == pytest.approx(1.5 * there[1].serialisation_s)
    back = [boundary_time(k, receivers, senders, 1e9, True) for k in (cluster, plain)]
    assert back[0] == back[1]


@pytest.mark.parametrize("is_divided", [False, True])
def test_bytes_between_nodes_are_those_that_cross(is_divided: bool) -> None:
    """Adding and incast take time on a path, not bytes."""
    link = replace(BETWEEN, reduce_bytes_per_s=1e9, incast=Incast(1, 3.0))
    found = []
    for cluster in (nodes_of_one(3, link), nodes_of_one(3, BETWEEN)):
        costs = CostModel(cluster, make_workload(use_distributed_optimizer=is_divided))
        placement = replicas_on(cluster)
        cost = costs.placement(placement)
        found.append((bytes_between_nodes(costs, placement, cost), cost.gradient_sync_s))
    assert found[0][0] == found[1][0]
    assert found[0][1] > found[1][1]


def test_a_plan_avoids_many_senders_to_one_receiver() -> None:
    """Six nodes: three replicas, each part of a gradient straight to its owner, or two where a card
    has its bandwidth once for all who send to it."""
    workload = make_workload(
        num_layers=6, hidden_size=1024, seq_length=1024, global_batch_size=12,
        use_distributed_optimizer=True,
    )  # fmt: skip
    links = Link(6e10, 1e-5), Link(6e10, 1e-5, incast=Incast(1, 1.0))
    free, shared = (plan_cluster(nodes_of_one(6, link), workload) for link in links)
    assert [len(plan.replicas) for plan in (free, shared)] == [3, 2]
    held = estimate_plan(free, nodes_of_one(6, links[1]))
    assert shared.estimates is not None
    assert held.step_time_s > shared.estimates.step_time_s


def test_nodes_that_differ_in_their_terms_alone_are_told_apart() -> None:
    cluster = make_cluster(("a", SLOW, 2), ("b", SLOW, 2))
    own = replace(INSIDE, reduce_bytes_per_s=1e9)
    cluster = replace(cluster, nodes=(cluster.nodes[0], replace(cluster.nodes[1], link=own)))
    workload = make_workload()
    costs = CostModel(cluster, workload)
    slow, fast = (costs.pieces(cluster.node_by_name[n], 2, 1024).layer.total_s for n in "ba")
    assert slow > fast
    kinds = kinds_of(make_problem(cluster, workload))
    assert sorted(node.name for kind in kinds for node in kind.nodes) == ["a", "b"]
    assert len(kinds) == 2


def test_another_network_keeps_its_terms() -> None:
    """What a faster network would change: nothing, where all the time goes into adding."""
    link = Link(1e12, 0.0, reduce_bytes_per_s=1e8)
    cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1), between=link)
    plan = place("tp1:4 @2 | tp1:4 @2", make_workload(), cluster)
    plan = replace(plan, hosts=canonical_hosts(plan.replicas, cluster))
    found = {v.what: v.change for v in variations(plan, cluster, None)}
    assert found["network between machines at twice its speed"] == pytest.approx(0, abs=0.01)
    problem = make_problem(cluster, make_workload())
    (faster,) = (g.cluster for g in additions(problem) if "the network" in g.what)
    assert faster.node_links["a", "b"] == replace(link, bytes_per_s=2e12)
