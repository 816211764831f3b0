"""Trees of links: what they refuse, and what they are for a cluster."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError
from megatron_hetero.files import canonical_json
from tests.cost.builders import FAST, SLOW, make_cluster
from tools.referees.gentree.from_cluster import cluster_tree
from tools.referees.gentree.tree import Branch, LinkTree
from tools.scale_clusters import cluster_data

ROOT = Path(__file__).resolve().parents[3]
LINK = Link(1e9, 1e-5)


def test_a_missing_uplink_is_named() -> None:
    with pytest.raises(ClusterError, match="'b' has no uplink to 'switch'"):
        LinkTree(Branch("switch", (Branch("a", (), LINK), Branch("b"))))


def test_two_ways_to_one_device_are_no_tree() -> None:
    a = Branch("a", (), LINK)
    with pytest.raises(ClusterError, match="has 'a' twice"):
        LinkTree(Branch("switch", (Branch("x", (a,), LINK), Branch("y", (a,), LINK))))


@pytest.mark.parametrize("link", [Link(0.0, 1e-5), Link(-1.0, 1e-5), Link(1e9, inf)])
def test_an_uplink_that_carries_nothing_is_named(link: Link) -> None:
    with pytest.raises(ClusterError, match="uplink of 'a'"):
        LinkTree(Branch("switch", (Branch("a", (), link),)))


def test_a_way_leads_up_and_down() -> None:
    near = Branch("near", (Branch("a", (), LINK), Branch("b", (), LINK)), LINK)
    tree = LinkTree(Branch("root", (near, Branch("c", (), LINK))))
    assert tree.holder_names == ("a", "b", "c")
    for ends, names in (
        ((0, 1), {"a out", "b in"}),
        ((0, 2), {"a out", "near out", "c in"}),
        ((2, 1), {"c out", "near in", "b in"}),
    ):
        _, edges = tree.paths(np.array([ends[0]]), np.array([ends[1]]))
        assert {tree.edge_name(edge) for edge in edges.tolist()} == names


def whole(cluster: Cluster) -> list[tuple[Device, ...]]:
    return [node.devices for node in cluster.nodes]


def test_the_tree_of_two_sites() -> None:
    cluster = load_cluster(ROOT / "examples" / "two-sites" / "cluster.yaml")
    found = cluster_tree(cluster, [(device,) for device in cluster.devices])
    assert found.remarks == ()
    assert found.tree.num_holders == 16
    by_name = {branch.name: branch for branch in found.tree.branches}
    north = by_name["site north"].up
    assert north is not None and north.bytes_per_s == pytest.approx(1.25e9)
    node, gpu = by_name["node north-0"].up, by_name["north-0:0"].up
    assert node is not None and node.bytes_per_s == pytest.approx(12.5e9)
    assert gpu is not None and gpu.bytes_per_s == pytest.approx(240e9)
    # From GPU to GPU of the other site it is as far as the file says, and inside a node too.
    assert 2 * (north.latency_s + node.latency_s + gpu.latency_s) >= 0.012 * (1 - 1e-9)
    assert 2 * gpu.latency_s == pytest.approx(5e-6)


def test_no_two_parts_are_nearer_than_the_cluster_says() -> None:
    for path in ("benchmarks/invented/racks", "benchmarks/invented/forty-nodes"):
        cluster = load_cluster(ROOT / path / "cluster.yaml")
        holders = whole(cluster)
        found = cluster_tree(cluster, holders)
        tree, place = found.tree, found.places
        for i, one in enumerate(holders):
            for j, other in enumerate(holders):
                if i == j:
                    continue
                _, edges = tree.paths(np.array([place[i]]), np.array([place[j]]))
                link = cluster.link(one[0], other[0])
                latency_s = float(tree.latency_s[edges].sum())
                assert latency_s >= link.latency_s * (1 - 1e-6)


def test_sites_make_regions_and_a_mesh_says_so(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(canonical_json(cluster_data(10_240)))
    cluster = load_cluster(path)
    first = {node.site: node for node in reversed(cluster.nodes)}
    found = cluster_tree(cluster, [node.devices for node in first.values()])
    assert len(found.tree.root.children) == 5
    assert all(len(region.children) == 20 for region in found.tree.root.children)
    assert any("mesh" in remark for remark in found.remarks)


def test_bad_holders_are_named() -> None:
    cluster = make_cluster(("a", FAST, 2), ("b", SLOW, 2))
    with pytest.raises(ClusterError, match="node 'c', which"):
        cluster_tree(cluster, [(Device("c", 0),)])
    with pytest.raises(ClusterError, match="on one node"):
        cluster_tree(cluster, [(Device("a", 0), Device("b", 0))])
    with pytest.raises(ClusterError, match="holder 0 has the devices none"):
        cluster_tree(cluster, [()])
    with pytest.raises(ClusterError, match="none are given"):
        cluster_tree(cluster, [])


def test_a_missing_link_is_named() -> None:
    cluster = make_cluster(("a", FAST, 1), ("b", FAST, 1))
    lacking = replace(cluster, node_links={})
    with pytest.raises(ClusterError, match="no link between 'a' and 'b'"):
        cluster_tree(lacking, whole(lacking))
