"""GenModel's prices on trees, by hand and beside a simulation of flows."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from megatron_hetero.cluster.node_links import Incast, Link
from megatron_hetero.exchange.baselines import parameter_servers, ring
from megatron_hetero.exchange.check import faults
from megatron_hetero.exchange.groups.grouping import even, grouped_plan
from tools.bench.schedules.exchange import correlation
from tools.flow_simulation import FlowSimulation
from tools.random_trees import random_tree, star, two_levels
from tools.referees.gentree.baselines import baselines, double_binary_tree, hierarchical_ring
from tools.referees.gentree.price import ExchangeLoads
from tools.referees.gentree.tree import Branch, DeviceTerms, LinkTree


@pytest.mark.parametrize("n", [2, 3, 5, 8, 13, 21])
def test_baselines_are_exact(n: int) -> None:
    for plan in baselines(997, star([1e9] * n, 1e-5)):
        assert not list(faults(plan)), plan.name


def test_what_is_a_leaf_of_one_binary_tree_has_children_in_the_other() -> None:
    for n in (4, 7, 8, 12):
        table = double_binary_tree(2 * n, n, "reduce_scatter").table
        inner = [set(table[table[:, 3] == start, 2].tolist()) for start in (0, n)]
        assert len(inner[0] & inner[1]) <= 1  # the root of a tree has one child of its own


def test_a_price_by_hand() -> None:
    """Two devices send halves to each other, and add: 1 s of bytes each way, 3 accesses."""
    leaves = tuple(
        Branch(name, (), Link(4e6, 0.05), None, DeviceTerms(1e-7, 2e-7)) for name in "ab"
    )
    tree = LinkTree(Branch("switch", leaves))
    price = ExchangeLoads(ring(2_000_000, 2), tree).price(4.0)
    assert price.latency_s == pytest.approx(2 * 0.1)
    assert price.bytes_s == pytest.approx(2 * 1.0)
    assert price.adding_s == pytest.approx(4e6 * 1e-7 + 3 * 4e6 * 2e-7)
    assert price.incast_s == 0
    assert price.total_s == pytest.approx(2.2 + 0.4 + 2.4)


def test_too_many_senders_slow_each_other() -> None:
    tree = star([1e6] * 5, 0.0, Incast(2, 0.5))
    price = ExchangeLoads(parameter_servers(500_000, 5), tree).price(4.0)
    # 1.6 MB to each of them, in either half, two of four senders too many
    assert price.bytes_s == pytest.approx(2 * 1.6)
    assert price.incast_s == pytest.approx(2 * 1.6 * 0.5 * 2)
    assert ExchangeLoads(ring(500_000, 5), tree).price(4.0).incast_s == 0


def test_senders_to_a_node_count_by_nodes() -> None:
    tree = two_levels([4, 4, 4], Link(1e12, 0.0), [Link(1e6, 0.0, incast=Incast(1, 1.0))] * 3)
    price = ExchangeLoads(hierarchical_ring(120_000, tree), tree).price(4.0)
    assert price.incast_s == 0
    all_at_once = grouped_plan(
        "x", "all_reduce", 120_000, even([even(range(i, i + 4)) for i in (0, 4, 8)])
    )
    price = ExchangeLoads(all_at_once, tree).price(4.0)
    assert price.incast_s == pytest.approx(price.bytes_s, rel=1e-3)  # twice as long


def test_a_ring_pays_for_a_slow_hop_once_a_pass() -> None:
    """The messages of a ring follow one another on every hop."""
    slow = Link(1e12, 0.5)
    tree = two_levels([4, 4], Link(1e12, 0.0), [slow, slow])
    price = ExchangeLoads(ring(8000, 8), tree).price(4.0)
    assert price.latency_s == pytest.approx(4.0)  # two hops of 1 s in each pass


def test_chunks_use_both_levels_at_once() -> None:
    tree = two_levels([4, 4], Link(1e9, 0.0), [Link(1e9, 0.0)] * 2)
    plan = grouped_plan("x", "all_reduce", 4_000_000, even([even(range(4)), even(range(4, 8))]))
    loads = ExchangeLoads(plan, tree)
    assert loads.price(4.0, 32).total_s < 0.75 * loads.price(4.0).total_s
    expanded = ExchangeLoads(replace(plan, num_chunks=8).expanded(), tree).price(4.0)
    assert loads.price(4.0, 8).total_s == pytest.approx(expanded.total_s, rel=1e-3)


def test_prices_rank_plans_as_a_simulation_of_flows_does() -> None:
    random = Random(7)
    found = []
    for _ in range(8):
        tree = random_tree(random, 9)
        plans = [*baselines(100_000, tree), *(replace(p, num_chunks=4)
                 for p in baselines(100_000, tree))]  # fmt: skip
        prices = [ExchangeLoads(p, tree).price(4.0, p.num_chunks).total_s for p in plans]
        found.append(correlation(prices, [FlowSimulation(p, tree, 4.0).run() for p in plans]))
    assert sum(found) / len(found) > 0.9


def test_the_simulation_by_hand() -> None:
    """Two senders share a receiver's link; one of them has less to send."""
    tree = star([1e6, 1e6, 1e6], 0.2)
    plan = grouped_plan("x", "reduce_scatter", 750_000, even([0, 1, 2]))
    # 1 MB of each to each other: everybody sends 2 MB and receives 2 MB
    assert FlowSimulation(plan, tree, 4.0).run() == pytest.approx(2.2)


def test_holders_of_plan_and_tree_have_to_agree() -> None:
    with pytest.raises(ValueError, match="the plan is of 3 holders, the tree of 2"):
        ExchangeLoads(ring(10, 3), star([1e9] * 2, 0.0))
