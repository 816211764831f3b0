"""Relative bandwidths of machines, read from the links and lines of clusters."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.exchange.groups.uplinks import relative_uplinks

LINKS = """
links:
  inside_node:
    A100-80GB: {bandwidth: 240 GB/s, latency: 5 us}
  between_nodes: {bandwidth: 100 Gb/s, latency: 10 us}
"""


def cluster_of(folder: Path, nodes: dict[str, str], more: str = "") -> Cluster:
    """A cluster of machines with 4 GPUs, each with its other keys."""
    rows = [f"  - {{name: {n}, gpu: A100-80GB, count: 4{keys}}}" for n, keys in nodes.items()]
    path = folder / "cluster.yaml"
    path.write_text("\n".join(["version: 1", "nodes:", *rows]) + LINKS + more)
    return load_cluster(path)


FOUR = [["a"], ["b"], ["c"], ["d"]]


def test_machines_alike_have_none(tmp_path: Path) -> None:
    cluster = cluster_of(tmp_path, dict.fromkeys("abcd", ""))
    assert relative_uplinks(cluster, FOUR) == ()
    assert relative_uplinks(cluster, [["a", "b"], ["c", "d"]]) == ()


def test_network_cards_of_100_and_25(tmp_path: Path) -> None:
    slow = ", uplink: 25 Gb/s"
    cluster = cluster_of(tmp_path, {"a": "", "b": "", "c": slow, "d": slow})
    assert relative_uplinks(cluster, FOUR) == ((4,), (4,), (1,), (1,))
    assert relative_uplinks(cluster, [["a", "c"], ["d", "b"]]) == ((4, 1), (1, 4))


def test_one_fast_machine_is_as_fast_as_its_fastest_path(tmp_path: Path) -> None:
    slow = ", uplink: 25 Gb/s"
    cluster = cluster_of(tmp_path, {"a": "", "b": slow, "c": slow, "d": slow})
    assert relative_uplinks(cluster, FOUR) == ()


SITES = """  between_sites:
    - {sites: [x, y, z], bandwidth: 100 Gb/s, latency: 1 ms, shared: none}
"""


def test_groups_are_no_faster_than_the_lines_of_their_sites(tmp_path: Path) -> None:
    """Site x leaves by 40 Gb/s, the others by 10; one of the machines of y is slower."""
    names = ["x0", "x1", "y0", "y1", "y2", "z0", "z1"]
    nodes = {name: f", site: {name[0]}" for name in names}
    nodes["y2"] += ", uplink: 50 Gb/s"
    uplinks = {"x": 40, "y": 10, "z": 10}
    lines = "sites:\n" + "".join(f"  {s}: {{uplink: {u} Gb/s}}\n" for s, u in uplinks.items())
    cluster = cluster_of(tmp_path, nodes, SITES + lines)
    x, y, z = names[:2], names[2:5], names[5:]
    assert relative_uplinks(cluster, [x, y, z]) == ((20, 20), (4, 4, 2), (5, 5))
    # A region has the lines of all its sites.
    one, region = relative_uplinks(cluster, [x, y + z])
    assert sum(region) == pytest.approx(sum(one), rel=0.01)
    # Machines that the groups leave out do not count; one of y has the line of two of z.
    assert relative_uplinks(cluster, [["y0"], z]) == ()
