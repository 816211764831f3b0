"""What is chosen for a tree: never worse than the usual exchanges, near the bound, fair shares."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from megatron_hetero.exchange.check import faults
from megatron_hetero.exchange.plan import Owned
from megatron_hetero.exchange.shares import balanced_shares
from tools.bench.schedules.exchange import BYTES, KINDS, gains
from tools.random_trees import random_tree, star
from tools.referees.gentree.baselines import baselines
from tools.referees.gentree.capacities import Capacities
from tools.referees.gentree.generate import CHUNKS, Generator
from tools.referees.gentree.least import least_all_reduce_s
from tools.referees.gentree.price import ExchangeLoads


def test_the_choice_is_never_slower_than_a_usual_exchange() -> None:
    random = Random(5)
    for _ in range(15):
        tree = random_tree(random, 24)
        size = random.choice((10_000, 3_000_000))
        chosen = Generator(tree, size, 4.0).choose()
        assert chosen.gain >= 1
        assert chosen.price.total_s >= least_all_reduce_s(tree, 4.0 * size) * (1 - 1e-9)
        for plan in baselines(size, tree):
            best = ExchangeLoads(plan, tree).num_chunks(4.0, CHUNKS, 2 * size)
            if best is not None:
                price = ExchangeLoads(plan, tree).price(4.0, best[1])
                assert chosen.price.total_s <= price.total_s * (1 + 1e-9)


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "1:4" in kind or "1:2:4" in kind or "alike, band" in kind]
)
def test_near_the_bound_where_bandwidth_binds(kind: str) -> None:
    make, size = KINDS[kind]
    row = gains(make(), size, False)
    assert float(row["over bound"]) <= 1.05
    if "alike" not in kind:
        assert float(row["gain"]) >= 1.2


@pytest.mark.parametrize("kind", ["12 alike, incast", "24 alike, incast"])
def test_gain_where_incast_binds(kind: str) -> None:
    make, size = KINDS[kind]
    row = gains(make(), size, True)
    assert float(row["gain"]) >= 1.2 and float(row["simulated"]) >= 1.2


def test_a_plan_carries_over_each_uplink_what_its_shares_say() -> None:
    tree = star([1e9, 1e9, 1e9, 4e9], 1e-6)
    plan = Generator(tree, 1_000_000, 4.0).choose().plan
    assert plan.sent[:3] / 1e6 == pytest.approx(1.0, rel=1e-3)
    assert plan.sent[3] / 1e6 == pytest.approx(3.0, rel=1e-3)


def test_owners_that_are_given_end_with_their_parts() -> None:
    tree = random_tree(Random(9), 12)
    num, size = tree.num_holders, 40_000
    cuts = [0, *(size * (i + 1) ** 2 // num**2 for i in range(num))]
    owners = [
        Owned(a, b, (3 * h) % num if num % 3 else h) for h, (a, b) in enumerate(pairwise(cuts))
    ]
    for purpose in ("reduce_scatter", "all_gather"):
        chosen = Generator(tree, size, 2.0, purpose, owners).choose()
        assert chosen.plan.owners == tuple(owners)
        assert not list(faults(chosen.plan))


def test_balanced_shares_take_all_uplinks_equally_long() -> None:
    random = Random(1)
    for _ in range(200):
        speeds = [random.choice((1.0, 2.0, 4.0, random.uniform(0.5, 9))) for _ in range(
            random.randint(3, 20))]  # fmt: skip
        shares = balanced_shares(speeds)
        assert sum(shares) == pytest.approx(1) and min(shares) >= 0
        times = [(1 + (len(speeds) - 2) * s) / v for s, v in zip(shares, speeds, strict=True)]
        busiest = max(t for t, s in zip(times, shares, strict=True) if s)
        owners = [t for t, s in zip(times, shares, strict=True) if s]
        assert owners == pytest.approx([busiest] * len(owners))
    assert balanced_shares([3.0, 1.0]) == (0.75, 0.25)


def test_a_node_is_no_faster_than_its_devices() -> None:
    tree = star([1e9, 2e9], 0.0)
    assert Capacities(tree).of_branch == (3e9, 1e9, 2e9)


def test_no_plan_keeps_to_no_buffers() -> None:
    with pytest.raises(ValueError, match="buffers"):
        Generator(star([1e9] * 4, 0.0), 1000, BYTES, max_received=0).choose()
