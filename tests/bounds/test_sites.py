"""What lines between sites let through: exact on cases that one can reckon."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_hetero.bounds.chains.kinds import gpu_classes
from megatron_hetero.bounds.sites import SiteBounds, rates_of
from megatron_hetero.cluster.lines import Line
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.lines import most_bytes_per_s
from tests.cost.builders import FAST, SLOW, make_cluster, make_workload

WORKLOAD = make_workload(num_layers=8, global_batch_size=16, tied_embeddings=False)


def two_sites(line_bytes_per_s: float, own_bytes_per_s: float = 1e9) -> Cluster:
    """Two fast GPUs on one site and two slow ones on another, each on a node of its own."""
    cluster = make_cluster(
        ("a", FAST, 1), ("b", FAST, 1), ("c", SLOW, 1), ("d", SLOW, 1),
        between=Link(min(own_bytes_per_s, line_bytes_per_s), 1e-3),
        sites=["east", "east", "west", "west"],
    )  # fmt: skip
    pairs = ("east", "west"), ("west", "east")
    lines = {(a, b): (Line(f"line {a} -> {b}", line_bytes_per_s),) for a, b in pairs}
    return replace(cluster, site_lines=lines)


def bounds(line_bytes_per_s: float) -> tuple[SiteBounds, float, float, float]:
    """The bounds; seconds of the work on one site, the other, and both."""
    costs = CostModel(two_sites(line_bytes_per_s), WORKLOAD)
    classes = gpu_classes(costs, apart="site")
    rates = rates_of([costs], classes)
    work = 16 * (8 + rates.head_layers)
    own = [work / rates_of([costs], [c]).layers_per_s for c in classes]
    return SiteBounds([costs], classes), *own, work / rates.layers_per_s


def test_paths_carry_no_more_than_the_lines_they_share() -> None:
    cluster = two_sites(3e9)
    pairs = [(a, b) for a in "ab" for b in "cd"]
    assert most_bytes_per_s(cluster, pairs) == 3e9
    assert most_bytes_per_s(cluster, pairs[:2]) == 2e9
    assert most_bytes_per_s(replace(cluster, site_lines={}), pairs) == 4e9
    one = replace(cluster.nodes[0], uplink_bytes_per_s=1.5e9)
    cluster = replace(cluster, nodes=(one, *cluster.nodes[1:]))
    assert most_bytes_per_s(cluster, pairs[:2]) == 1.5e9


def test_over_a_line_that_carries_nothing_one_site_does_all() -> None:
    found, fast_s, slow_s, _ = bounds(1.0)
    assert fast_s < slow_s
    assert found.least_s() == pytest.approx(fast_s, rel=1e-3)
    assert found.least_inside_s("west", True) == pytest.approx(slow_s, rel=1e-3)


def test_over_an_endless_line_all_work_together() -> None:
    found, *_, both_s = bounds(1e18)
    assert found.least_s() == pytest.approx(both_s, rel=1e-3)


def test_all_replicas_that_leave_a_site_and_come_back_cross_twice() -> None:
    """Half a second for all activations of a step, one way; gradients of a layer take longer than
    any case lasts."""
    costs = CostModel(two_sites(1e18), WORKLOAD)
    speed = 16 * costs.activation_bytes / 0.5
    found, fast_s, slow_s, both_s = bounds(speed)
    assert both_s < 0.5
    assert found.least_s() <= min(0.5, fast_s, slow_s) * (1 + 1e-9)
    assert found.least_inside_s("west", True) <= min(1.0, slow_s) * (1 + 1e-9)
    assert found.least_inside_s("west", True) >= found.least_inside_s("west", False) - 1e-12


def test_without_lines_it_says_nothing() -> None:
    costs = CostModel(replace(two_sites(1.0), site_lines={}), WORKLOAD)
    assert SiteBounds([costs], gpu_classes(costs)).least_s() == 0.0
