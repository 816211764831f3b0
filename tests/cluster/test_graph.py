from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cluster.graph import connected_parts, link_graph
from megatron_hetero.cluster.node_links import Link


def test_an_edge_has_the_slower_direction() -> None:
    links = {("a", "b"): Link(2e9, 1e-6), ("b", "a"): Link(1e9, 5e-7)}
    graph = link_graph(["a", "b"], links)
    assert graph.edges["a", "b"] == {"bytes_per_s": 1e9, "latency_s": 1e-6}


@given(st.integers(1, 12), st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11))))
def test_parts_are_the_classes_of_reachability(
    num_nodes: int, pairs: list[tuple[int, int]]
) -> None:
    names = [f"n{i}" for i in range(num_nodes)]
    edges = {(a, b) for a, b in pairs if a < num_nodes and b < num_nodes and a != b}
    part_of = list(range(num_nodes))
    for a, b in sorted(edges):
        part_of = [part_of[a] if p == part_of[b] else p for p in part_of]
    expected = {tuple(n for n, p in zip(names, part_of, strict=True) if p == q) for q in part_of}
    parts = connected_parts(names, {(names[a], names[b]): Link(1.0, 0.0) for a, b in edges})
    assert set(parts) == expected
    assert [p[0] for p in parts] == sorted((p[0] for p in parts), key=names.index)
