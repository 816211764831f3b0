"""The multilevel partition: parts of the right sizes, and cuts near the exact ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hetero.planner.hexiscale.partition import Weights, partition


@st.composite
def graphs(draw: st.DrawFn, max_vertices: int = 40) -> tuple[list[float], Weights]:
    num_vertices = draw(st.integers(1, max_vertices))
    weights = draw(
        st.lists(st.sampled_from([1.0, 2.0, 5.5]), min_size=num_vertices, max_size=num_vertices)
    )
    random = draw(st.randoms(use_true_random=False))
    edges = np.zeros((num_vertices, num_vertices))
    for i in range(num_vertices):
        for j in range(i):
            edges[i, j] = edges[j, i] = random.choice([0.0, 0.1, 1.0, 20.0])
    return weights, edges


@settings(max_examples=60, deadline=None)
@given(graphs(), st.data())
def test_every_vertex_is_in_one_part_and_no_part_is_empty(
    graph: tuple[list[float], Weights], data: st.DataObject
) -> None:
    weights, edges = graph
    num_parts = data.draw(st.integers(1, len(weights)))
    parts = partition(weights, edges, num_parts)
    assert len(parts) == num_parts
    assert all(parts)
    assert sorted(vertex for part in parts for vertex in part) == list(range(len(weights)))
    assert partition(weights, edges, num_parts) == parts


def test_small_bisections_are_near_the_best() -> None:
    """200 random graphs of equal vertices: equal halves; within 2 % of the exact cut on average."""
    random = np.random.default_rng(1)
    ratios = []
    for _ in range(200):
        half = int(random.integers(2, 6))
        edges = np.triu(random.choice([0.1, 1.0, 5.0, 20.0], (2 * half, 2 * half)), 1)
        edges = edges + edges.T
        parts = partition([1.0] * (2 * half), edges, 2)
        assert [len(part) for part in parts] == [half, half]
        best = min(
            cut_weight(edges, (left, tuple(set(range(2 * half)) - set(left))))
            for left in combinations(range(2 * half), half)
        )
        ratios.append(cut_weight(edges, parts) / best)
    assert float(np.mean(ratios)) < 1.02


def test_machines_stay_whole_or_are_spread_as_the_weights_say() -> None:
    """16 machines of 8: fast links are kept inside 16 parts, or all cut where that is cheap."""
    machine = np.arange(128) // 8
    same = machine[:, None] == machine[None, :]
    edges = np.where(same, 10.0, 0.1)
    np.fill_diagonal(edges, 0)
    whole = partition([1.0] * 128, edges, 16)
    assert {frozenset(machine[list(part)]) for part in whole} == {
        frozenset([name]) for name in range(16)
    }
    spread = partition([1.0] * 128, np.where(edges > 0, 1 / np.maximum(edges, 0.1), 0), 8)
    assert all(len(part) == 16 and len(set(machine[list(part)])) >= 15 for part in spread)


def test_passes_that_gain_by_rounding_alone_end() -> None:
    # Two passes that undo each other each seemed nearer by the last digit of a sum.
    heavy, light = 8.100735335439369, 5.720399189028148
    group = np.array([0, 0, 0, 1, 0, 0, 1])
    edges = np.where(group[:, None] == group[None], 3.3, 0.7)
    np.fill_diagonal(edges, 0)
    parts = partition([heavy] * 5 + [light] * 2, edges, 2)
    assert sorted(vertex for part in parts for vertex in part) == list(range(7))


def cut_weight(edge_weights: Weights, parts: Sequence[Sequence[int]]) -> float:
    """Return weight of all edges between different parts."""
    inside = sum(float(edge_weights[np.ix_(part, part)].sum()) for part in parts)
    return (float(edge_weights.sum()) - inside) / 2
