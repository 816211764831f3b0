from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.seconds import slowest_link, worst_link
from tests.cost.builders import FAST, SLOW
from tests.planner.strategies import clusters


@st.composite
def sites(draw: st.DrawFn) -> Cluster:
    """Nodes on two or three sites, each pair of sites with its own link, one pair of nodes with
    another."""
    names = draw(st.lists(st.sampled_from("abc"), min_size=2, max_size=5))
    nodes = tuple(
        Node(f"n{i}", (FAST, SLOW)[i % 2], 1 + i % 3, site, f"n{i}", Link(1e10 * (i + 1), 1e-6))
        for i, site in enumerate(names)
    )
    speeds = {pair: draw(st.sampled_from([1e8, 1e9])) for pair in permutations("abcabc", 2)}
    links = {
        (a.name, b.name): Link(speeds[a.site, b.site], 1e-4) for a, b in permutations(nodes, 2)
    }
    links["n0", "n1"] = links["n1", "n0"] = Link(5e7, 1e-2)
    return Cluster(nodes, links)


@given(st.data(), st.one_of(sites(), clusters(8)))
def test_the_slowest_of_a_group_is_the_worst_of_its_pairs(
    data: st.DataObject, cluster: Cluster
) -> None:
    group = data.draw(
        st.lists(st.sampled_from(cluster.devices), min_size=2, max_size=8, unique=True)
        if len(cluster.devices) > 1
        else st.just([*cluster.devices, *cluster.devices])
    )
    pairs = [cluster.link(a, b) for a, b in permutations(group, 2)]
    assert slowest_link(cluster, group) == worst_link(pairs)
