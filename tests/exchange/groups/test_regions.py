"""Regions are what the tree of links has below its root."""

from __future__ import annotations

from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.exchange.groups.regions import regions
from megatron_hetero.files import canonical_json
from tools.referees.gentree.from_cluster import cluster_tree
from tools.scale_clusters import cluster_data

ROOT = Path(__file__).resolve().parents[3]


def below_root(cluster: Cluster, sites: list[str]) -> list[list[str]]:
    """Return the sites below each child of the root of the tree of one GPU a site."""
    first = {node.site: node for node in reversed(cluster.nodes)}
    found = cluster_tree(cluster, [(first[site].devices[0],) for site in sites])
    given = {number: place for place, number in enumerate(found.places)}
    (_, children), *_ = found.tree.inner()
    places = [sorted(given[h] for h in found.tree.holders_below(child)) for child in children]
    return [[sites[place] for place in region] for region in places]


def test_regions_are_below_the_root_of_the_tree(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(canonical_json(cluster_data(10_240)))
    cluster = load_cluster(path)
    sites = list(dict.fromkeys(node.site for node in cluster.nodes))[::-1]
    found = regions(cluster, sites)
    assert found == below_root(cluster, sites)
    assert len(found) == 5


def test_two_sites_are_a_region_each() -> None:
    cluster = load_cluster(ROOT / "examples" / "two-sites" / "cluster.yaml")
    assert regions(cluster, ["south", "north"]) == [["north"], ["south"]]
