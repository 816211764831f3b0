"""The order of a rehearsal's rings: by ranks and hosts, whatever the planner makes of sites."""

from __future__ import annotations

from pathlib import Path

from megatron_hetero.cluster.file.description import load_cluster
from megatron_hetero.lab.rehearse.links.network import Network

ROOT = Path(__file__).resolve().parents[4]


def test_a_ring_goes_node_by_node_in_the_order_of_ranks() -> None:
    cluster = load_cluster(ROOT / "examples/two-sites/cluster.yaml")
    named = {device.name: device for device in cluster.devices}
    names = ("south-0:0", "north-0:0", "south-0:1", "north-1:0", "north-0:1")
    network = Network(cluster, [named[name] for name in names])
    order = [names[rank] for rank in network._around((4, 3, 2, 1, 0))]
    assert order == ["south-0:0", "south-0:1", "north-0:0", "north-0:1", "north-1:0"]
    assert len(network.ring((0, 1, 2), 1e6, 1).hops) == 3
