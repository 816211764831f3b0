"""Which links have the measured constants of NVLink."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.inventory.draft import link_guess
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nvlink import nvlink_curve, with_collectives

FILE = """
version: 1
nodes:
  - {name: a, gpu: A100-40GB, count: 4}
  - {name: b, gpu: RTX-4090, count: 2}
  - {name: c, gpu: H100-80GB, count: 2, link: {bandwidth: 50 GB/s, latency: 5 us}}
  - {name: d, gpu: H100-80GB, count: 1}
links:
  inside_node:
    A100-40GB: {bandwidth: 240 GB/s, latency: 5 us}
    RTX-4090: {bandwidth: 20 GB/s, latency: 12 us}
  between_nodes: {bandwidth: 25 Gb/s, latency: 30 us}
"""


def test_types_share_the_constants_of_as_fast_an_nvlink() -> None:
    assert nvlink_curve("A100-40GB") is nvlink_curve("A100-80GB") is not None
    for name in ("H200", "H20-96GB", "GH200-96GB"):
        assert nvlink_curve(name) is nvlink_curve("H100-80GB")
    assert nvlink_curve("GB300") is nvlink_curve("B200") is not nvlink_curve("H100-80GB")
    # 200 GB/s: those of 300; 150 and 80 are too far from it.
    assert nvlink_curve("A800-80GB") is nvlink_curve("H800-80GB") is nvlink_curve("A100-80GB")


@pytest.mark.parametrize("name", ["V100-16GB", "P100-16GB", "RTX-3090", "L40S", "MI300X", "mine"])
def test_other_links_have_none(name: str) -> None:
    assert nvlink_curve(name) is None
    assert with_collectives(Link(100e9, 5e-6), name) == Link(100e9, 5e-6)


def test_a_file_says_which_machines_have_it(tmp_path: Path) -> None:
    """Not a link that PCIe could be, nor the memory that stands for the link of a single GPU."""
    (tmp_path / "cluster.yaml").write_text(FILE)
    cluster = load_cluster(tmp_path / "cluster.yaml")
    found = {node.name: node.link.nvlink for node in cluster.nodes}
    assert found == {"a": nvlink_curve("A100-80GB"), "b": None, "c": None, "d": None}
    faster = cluster.node_by_name["a"].link.times_as_fast(2.0)
    assert faster.nvlink is found["a"] and faster.bytes_per_s == 480e9


def test_drafts_guess_what_collectives_reach() -> None:
    curve = nvlink_curve("H100-80GB")
    assert curve is not None
    assert link_guess("H100-80GB") == (f"{curve.part_of_sheet * 450:.0f} GB/s", "5 us")
    assert link_guess("V100-16GB") == ("100 GB/s", "5 us")
