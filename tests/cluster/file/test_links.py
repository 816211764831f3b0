"""Links by lists of sites: which list counts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import cluster_hash, load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError

NODES = """\
version: 1
nodes:
  - {name: a, gpu: T4, count: 1, site: one}
  - {name: b, gpu: T4, count: 1, site: two}
  - {name: c, gpu: T4, count: 1, site: three}
  - {name: d, gpu: T4, count: 1, site: three}
links:
  between_nodes: {three: {bandwidth: 8 GB/s, latency: 1 us}}
  between_sites:
"""
WIDE = "    - {sites: [four, one, two, three], bandwidth: 3 GB/s, latency: 1 ms}\n"
ALL = "    - {sites: [one, two, three], bandwidth: 1 GB/s, latency: 9 ms, price_per_gb: 3}\n"
PAIR = "    - {sites: [two, three], bandwidth: 2 GB/s, latency: 1 ms}\n"


def _load(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


@pytest.mark.parametrize("order", [(ALL, PAIR), (PAIR, ALL)])
def test_the_shortest_list_that_holds_both_sites_counts(
    tmp_path: Path, order: tuple[str, str]
) -> None:
    cluster = _load(tmp_path, NODES + "".join(order))
    speeds = {pair: link.bytes_per_s for pair, link in cluster.node_links.items()}
    assert {pair: speed for pair, speed in speeds.items() if pair[0] < pair[1]} == {
        ("a", "b"): 1e9, ("a", "c"): 1e9, ("a", "d"): 1e9,
        ("b", "c"): 2e9, ("b", "d"): 2e9, ("c", "d"): 8e9,
    }  # fmt: skip
    assert all(speeds[b, a] == speed for (a, b), speed in speeds.items())
    # The price is that of the list that counts, and the shorter one has none.
    assert set(cluster.prices_per_gb) == {
        ("one", "two"), ("two", "one"), ("one", "three"), ("three", "one"),
    }  # fmt: skip


def test_a_list_is_the_same_as_all_its_pairs(tmp_path: Path) -> None:
    listed = _load(tmp_path, NODES + ALL)
    link = "bandwidth: 1 GB/s, latency: 9 ms, price_per_gb: 3"
    pairs = "".join(
        f"    - {{sites: [{a}, {b}], {link}}}\n"
        for a, b in (("three", "one"), ("one", "two"), ("two", "three"))
    )
    assert cluster_hash(listed) == cluster_hash(_load(tmp_path, NODES + pairs))


def test_lists_of_one_length_may_share_sites_that_a_shorter_one_holds(tmp_path: Path) -> None:
    more = NODES.replace("links:", "  - {name: e, gpu: T4, count: 1, site: four}\nlinks:")
    text = more + ALL.replace("one, ", "four, ") + ALL + PAIR + WIDE
    speeds = {pair: link.bytes_per_s for pair, link in _load(tmp_path, text).node_links.items()}
    assert (speeds["b", "c"], speeds["a", "b"], speeds["e", "c"]) == (2e9, 1e9, 1e9)
    assert speeds["a", "e"] == 3e9


def test_two_lists_of_one_length_are_refused(tmp_path: Path) -> None:
    more = NODES.replace("links:", "  - {name: e, gpu: T4, count: 1, site: four}\nlinks:")
    text = more + ALL + "    - {sites: [four, two, three], bandwidth: 1 GB/s, latency: 9 ms}\n"
    with pytest.raises(ClusterError) as error:
        _load(tmp_path, text)
    assert ':12: links.between_sites[1].sites: {"two", "three"} are both in between_sites[0]' in (
        str(error.value)
    )
