"""What paths between nodes share: lines between sites, backbones, uplinks."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import cluster_hash, load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import ClusterError

TEXT = """\
version: 1
nodes:
  - {name: a, gpu: T4, count: 1, site: one}
  - {name: b, gpu: T4, count: 1, site: one}
  - {name: c, gpu: T4, count: 1, site: two}
  - {name: d, gpu: T4, count: 1, site: three}
links:
  between_nodes: {bandwidth: 8 GB/s, latency: 1 us}
  between_sites:
    - {sites: [one, two, three], bandwidth: 1 GB/s, latency: 9 ms}
"""


def _load(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


def _shared(text: str, how: str) -> str:
    return text.replace("latency: 9 ms}", f"latency: 9 ms, shared: {how}}}")


def _lines(cluster: Cluster, here: str, there: str) -> list[tuple[str, float]]:
    return [(line.name, line.bytes_per_s) for line in cluster.lines(here, there)]


def test_each_two_sites_have_one_line_that_all_their_nodes_share(tmp_path: Path) -> None:
    cluster = _load(tmp_path, TEXT)
    assert _lines(cluster, "a", "c") == _lines(cluster, "b", "c") == [("line one -> two", 1e9)]
    assert _lines(cluster, "c", "a") == [("line two -> one", 1e9)]
    assert _lines(cluster, "a", "d") == [("line one -> three", 1e9)]
    assert _lines(cluster, "a", "b") == _lines(cluster, "a", "a") == []
    assert cluster_hash(cluster) == cluster_hash(_load(tmp_path, _shared(TEXT, "pair")))


def test_a_backbone_is_one_capacity_in_each_direction(tmp_path: Path) -> None:
    cluster = _load(tmp_path, _shared(TEXT, "all"))
    forth = {cluster.lines(*pair) for pair in (("a", "c"), ("b", "d"), ("c", "d"))}
    back = {cluster.lines(*pair) for pair in (("c", "a"), ("d", "b"), ("d", "c"))}
    assert len(forth) == len(back) == 1 and forth != back
    assert _lines(cluster, "a", "c") == [("backbone one, two, three (forth)", 1e9)]


def test_a_path_may_be_its_nodes_own(tmp_path: Path) -> None:
    cluster = _load(tmp_path, _shared(TEXT, "none"))
    assert not cluster.has_lines
    assert cluster.node_links["a", "c"].bytes_per_s == 1e9


def test_who_shares_counts_in_the_hash(tmp_path: Path) -> None:
    texts = [TEXT, _shared(TEXT, "all"), _shared(TEXT, "none"), with_uplinks(TEXT)]
    texts.append(TEXT.replace("name: a, ", "name: a, uplink: 9 GB/s, "))
    assert len({cluster_hash(_load(tmp_path, text)) for text in texts}) == len(texts)


def with_uplinks(text: str) -> str:
    text = text.replace("name: a, ", "name: a, uplink: 4 GB/s, ")
    return text.replace("links:", "sites: {one: {uplink: 500 MB/s}, two: {uplink: 2 GB/s}}\nlinks:")


def test_uplinks_come_beside_the_line_and_cap_the_paths(tmp_path: Path) -> None:
    cluster = _load(tmp_path, with_uplinks(TEXT))
    assert _lines(cluster, "a", "c") == [
        ("uplink of a out", 4e9),
        ("uplink of site one out", 5e8),
        ("line one -> two", 1e9),
        ("uplink of site two in", 2e9),
    ]
    assert _lines(cluster, "c", "b") == [
        ("uplink of site two out", 2e9),
        ("line two -> one", 1e9),
        ("uplink of site one in", 5e8),
    ]
    assert _lines(cluster, "a", "b") == [("uplink of a out", 4e9)]
    speeds = {pair: link.bytes_per_s for pair, link in cluster.node_links.items()}
    assert (speeds["a", "b"], speeds["b", "a"], speeds["a", "c"]) == (4e9, 4e9, 5e8)
    assert (speeds["c", "d"], speeds["d", "c"]) == (1e9, 1e9)


def test_where_all_cards_are_slow_the_class_is(tmp_path: Path) -> None:
    """Few links of their own, however many nodes."""
    text = TEXT.replace("count: 1, site: one", "count: 1, site: one, uplink: 2 GB/s")
    cluster = _load(tmp_path, text)
    assert cluster.node_links["a", "b"].bytes_per_s == 2e9
    assert not cluster.link_summary.others


def test_a_line_is_no_slower_than_what_was_measured_over_it(tmp_path: Path) -> None:
    measured = "  measured:\n    - {nodes: [a, c], bandwidth: 3 GB/s, latency: 8 ms}\n"
    cluster = _load(tmp_path, TEXT + measured)
    assert _lines(cluster, "b", "c") == [("line one -> two", 3e9)]
    assert _lines(cluster, "a", "d") == [("line one -> three", 1e9)]
    assert cluster.node_links["a", "c"].bytes_per_s == 3e9
    assert cluster.node_links["b", "c"].bytes_per_s == 1e9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            TEXT.replace("links:", "sites: {tow: {uplink: 1 GB/s}}\nlinks:"),
            ':7: sites.tow: there is no site "tow"',
        ),
        (_shared(TEXT, "some"), "links.between_sites[0].shared"),
        (TEXT.replace("name: a, ", "name: a, uplink: 4, "), "nodes[0].uplink"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClusterError) as error:
        _load(tmp_path, text)
    assert message in str(error.value)
