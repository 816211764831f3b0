"""More GPUs like those of a machine with unlike cards come as machines of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.planner.advise.capacity import MoreGpus
from megatron_hetero.planner.advise.nothing_fits.relaxations import more_words, with_more

BOX = """
version: 1
nodes:
  - name: box
    gpus: [{type: RTX-4090, count: 1}, {type: RTX-3090, count: 2}]
    link: {bandwidth: 12 GB/s, latency: 15 us}
    pairs: [{cards: [1, 2], bandwidth: 50 GB/s, latency: 8 us}]
    root_complex: 20 GB/s
"""
DESK = """
  - {name: desk, gpu: A10, count: 1}
links: {between_nodes: {bandwidth: 10 Gb/s, latency: 30 us}}
"""
SLOT, NETWORK = Link(12e9, 15e-6), Link(1.25e9, 30e-6)


def grown(text: str, folder: Path) -> tuple[Cluster, Cluster, MoreGpus]:
    """The cluster of a file, and with three RTX 3090 more."""
    path = folder / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    cluster = load_cluster(path)
    more = MoreGpus(cluster.node_by_name["box/RTX-3090"], 3)
    return cluster, with_more(cluster, more), more


def test_added_machines_are_no_islands_of_the_box(tmp_path: Path) -> None:
    cluster, larger, more = grown(BOX + DESK, tmp_path)
    added = larger.nodes[len(cluster.nodes) :]
    assert [(n.name, n.num_gpus, n.is_island) for n in added] == [
        ("box-more-0", 2, False),
        ("box-more-1", 1, False),
    ]
    assert [d.name for n in added for d in n.devices] == [
        "box-more-0:0",
        "box-more-0:1",
        "box-more-1:0",
    ], "their cards are numbered from 0, whatever the places of those that they copy"
    assert len({node.host for node in larger.nodes if node.machine != "box"}) == 3
    assert more_words(cluster, more) == (
        "3 more RTX-3090: 1 more machine like box (2x RTX-3090) and one with 1x RTX-3090"
    )


def test_added_machines_are_reached_over_the_network(tmp_path: Path) -> None:
    """Not over the slots, by which the islands of the box reach each other."""
    _, larger, _ = grown(BOX + DESK, tmp_path)
    links = larger.node_links
    for old in ("box/RTX-4090", "box/RTX-3090", "desk", "box-more-1"):
        assert links["box-more-0", old] == links[old, "box-more-0"] == NETWORK
    assert larger.link(Device("box-more-0", 0), Device("box-more-0", 1)) == Link(50e9, 8e-6)
    # All that goes to the box shares its path, whichever of its cards it is for.
    names = {
        line.name
        for old in ("box/RTX-4090", "box/RTX-3090")
        for line in larger.lines("box-more-0", old)
    }
    assert names == {"path box-more-0 -> box"}
    assert [line.name for line in larger.lines("box/RTX-4090", "box/RTX-3090")] == [
        "root complex of box"
    ]


def test_a_box_that_is_alone_lends_its_own_link(tmp_path: Path) -> None:
    """Nothing says how machines would be joined: as the cards that are copied are."""
    _, larger, _ = grown(BOX, tmp_path)
    inside = larger.node_by_name["box/RTX-3090"].link
    assert larger.node_links["box-more-0", "box/RTX-3090"] == inside
    assert larger.node_links["box-more-0", "box/RTX-4090"] == inside
    assert larger.node_links["box/RTX-4090", "box/RTX-3090"] == SLOT


@pytest.mark.parametrize("text", [BOX, BOX + DESK])
def test_every_two_nodes_are_joined(text: str, tmp_path: Path) -> None:
    _, larger, _ = grown(text, tmp_path)
    names = [node.name for node in larger.nodes]
    assert {(a, b) for a in names for b in names if a != b} == set(larger.node_links)
