"""Lines of machines with unlike cards: an exchange loads those that `Cluster.lines` names."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cost.network.lines import LineTable, line_seconds

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


def test_an_exchange_loads_the_lines_of_its_paths(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE, encoding="utf-8")
    cluster = load_cluster(path)
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
