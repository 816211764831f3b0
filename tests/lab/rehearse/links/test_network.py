"""The paths of a rehearsal: what nodes share is one path for all of them."""

from __future__ import annotations

from dataclasses import replace

from megatron_hetero.cluster.lines import Line
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.lab.rehearse.links.board import Board
from megatron_hetero.lab.rehearse.links.network import Network, SlowLink
from tests.cost.builders import SLOW, make_cluster

CLUSTER = replace(
    make_cluster(
        ("a", SLOW, 1), ("b", SLOW, 1), ("c", SLOW, 1), ("d", SLOW, 1),
        between=Link(1e9, 0.0), sites=["east", "east", "west", "west"],
    ),
    site_lines={
        ("east", "west"): (Line("line east -> west", 1e9), Line("uplink of site west in", 4e9)),
        ("west", "east"): (Line("line west -> east", 1e9),),
    },
)  # fmt: skip


def test_two_pairs_of_nodes_take_turns_on_their_line() -> None:
    network = Network(CLUSTER, CLUSTER.devices)
    board = Board(len(network.path_names), 8)
    taken = [network.hop(*pair).taken(1e9) for pair in ((0, 2), (1, 3), (0, 1))]
    names = [
        {network.path_names[number]: seconds for paths, seconds in of for number in paths}
        for of in taken
    ]
    shared = {"line east -> west": 1.0, "uplink of site west in": 0.25}
    assert names == [{"a -> c": 1.0, **shared}, {"b -> d": 1.0, **shared}, {"a -> b": 1.0}]
    assert [board.take((n,), hops, 0.0) for n, hops in enumerate(taken)] == [1.0, 2.0, 1.0]


def test_a_slow_link_is_slow_for_its_two_nodes_alone() -> None:
    network = Network(CLUSTER, CLUSTER.devices, [SlowLink("a", "c", 3.0)])
    slow, other = (network.hop(*pair).taken(1e9) for pair in ((0, 2), (1, 3)))
    by_name = {network.path_names[n]: seconds for paths, seconds in slow for n in paths}
    assert by_name == {"a -> c": 3.0, "line east -> west": 1.0, "uplink of site west in": 0.25}
    assert max(seconds for _, seconds in other) == 1.0
