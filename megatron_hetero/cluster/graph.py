"""The cluster as a graph: nodes joined by links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_hetero.cluster.node_links import Link

if TYPE_CHECKING:
    import networkx


def link_graph(
    node_names: Iterable[str], node_links: Mapping[tuple[str, str], Link]
) -> networkx.Graph[Any]:
    """Build the undirected graph of node names; where the directions differ, an edge has the slower
    one."""
    import networkx  # a tenth of a second

    graph: networkx.Graph[Any] = networkx.Graph()
    graph.add_nodes_from(node_names)
    # Sorted, so that the graph does not depend on the order of the file.
    for (a, b), link in sorted(node_links.items(), key=lambda item: item[0]):
        # The first direction of a pair sets the edge, the second may only slow it.
        known = graph.get_edge_data(a, b, {"bytes_per_s": link.bytes_per_s, "latency_s": 0.0})
        graph.add_edge(
            a,
            b,
            bytes_per_s=min(link.bytes_per_s, known["bytes_per_s"]),
            latency_s=max(link.latency_s, known["latency_s"]),
        )
    return graph


def connected_parts(
    node_names: Iterable[str], node_links: Mapping[tuple[str, str], Link]
) -> tuple[tuple[str, ...], ...]:
    """Return the connected components of the nodes, each in the order of `node_names`."""
    import networkx

    names = tuple(node_names)
    # Sets of networkx have no order; parts and members get that of the names.
    position = {name: i for i, name in enumerate(names)}
    parts = networkx.connected_components(link_graph(names, node_links))
    ordered = (tuple(sorted(part, key=position.__getitem__)) for part in parts)
    return tuple(sorted(ordered, key=lambda part: position[part[0]]))
