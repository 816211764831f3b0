"""Lines of machines with unlike cards: an exchange loads those that `Cluster.lines` names."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.network.lines import LineTable, line_seconds, most_bytes_per_s

FILE = """
version: 1
nodes:
  - name: a
    gpus: [{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]
    link: {bandwidth: 12 GB/s, latency: 15 us}
    root_complex: 20 GB/s
    uplink: 10 Gb/s
    site: lab
  - name: b
    gpus: [{type: A10, count: 1}, {type: A40, count: 1}]
    link: {bandwidth: 12 GB/s, latency: 15 us}
    site: lab
  - {name: c, gpu: A10, count: 2, site: attic}
sites: {lab: {uplink: 1 Gb/s}}
links:
  inside_node: {A10: {bandwidth: 12 GB/s, latency: 15 us}}
  between_nodes: {lab: {bandwidth: 20 Gb/s, latency: 30 us}}
  between_sites: [{sites: [lab, attic], bandwidth: 2 Gb/s, latency: 8 ms}]
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    return load_cluster(path)


def test_an_exchange_loads_the_lines_of_its_paths(cluster: Cluster) -> None:
    table = LineTable(cluster)
    names = {number: name for name, number in table.numbers.items()}
    pairs = list(permutations(range(len(cluster.nodes)), 2))
    senders, receivers = (np.array(ends) for ends in zip(*pairs, strict=True))
    carried = np.arange(1.0, len(pairs) + 1) * 1e6
    lines, seconds = table.loads(senders, receivers, carried)
    nodes = [node.name for node in cluster.nodes]
    paths = [(nodes[a], nodes[b]) for a, b in pairs]
    expected = line_seconds(cluster, zip(paths, carried, strict=True))
    assert "root complex of a" in expected
    assert {names[i]: s for i, s in zip(lines, seconds, strict=True)} == pytest.approx(expected)


def test_no_exchange_is_faster_than_what_its_islands_share(cluster: Cluster) -> None:
    """Four pairs of islands have one path between their machines, and two share a root complex."""
    a, b = (["a/RTX-4090", "a/RTX-3090"], ["b/A10", "b/A40"])
    across = [(one, other) for one in a for other in b]
    assert most_bytes_per_s(cluster, across) == 1.25e9  # the 10 Gb/s of a's uplink
    assert most_bytes_per_s(cluster, across[:1]) == 1.25e9
    # Both directions of the box share 20 GB/s; each card's slot alone has 12.
    inside = [(a[0], a[1]), (a[1], a[0])]
    assert most_bytes_per_s(cluster, inside) == 20e9
    assert most_bytes_per_s(cluster, inside[:1]) == 12e9
    # Without a root complex that anybody described the slots are the limit.
    assert most_bytes_per_s(cluster, [(b[0], b[1]), (b[1], b[0])]) == 24e9


def test_an_island_loads_the_path_of_its_machine_and_no_other(cluster: Cluster) -> None:
    table = LineTable(cluster)
    places = {node.name: i for i, node in enumerate(cluster.nodes)}

    def loaded(*pairs: tuple[str, str]) -> set[str]:
        senders, receivers = (
            np.array([places[n] for n in ends]) for ends in zip(*pairs, strict=True)
        )
        lines, _ = table.loads(senders, receivers, np.ones(len(pairs)))
        names = {number: name for name, number in table.numbers.items()}
        return {names[i] for i in lines}

    assert loaded(("a/RTX-4090", "a/RTX-3090")) == {"root complex of a"}
    assert loaded(("b/A10", "b/A40")) == set()
    assert "path b -> a" in loaded(("b/A10", "a/RTX-3090"))
    assert loaded(("b/A10", "a/RTX-3090")) == loaded(("b/A40", "a/RTX-4090"))
    assert "root complex of a" not in loaded(("b/A10", "a/RTX-3090"))
