"""The order of a ring's members in which its slowest neighbours are fastest.

Sailor's simulator charges a ring by its slowest pair of neighbours, one way and without the pair
that closes it.  In which order replicas stand is the plan's to choose, so a score is that of the
best order found.  Members of a kind are alike: an order is a walk that visits kind `i` `counts[i]`
times, which is an Euler circuit through one more node, where the walk begins and ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product

import networkx as nx

_Arcs = Counter[tuple[int, int]]


def slowest_neighbours(counts: Sequence[int], cost: Sequence[Sequence[float]]) -> float:
    """The largest `cost[i][j]` of neighbours `i`, `j` in the best order found.

    Exact but for one thing: where the cheapest arcs fall apart into circuits that no exchange of
    two arcs joins, the next dearer arcs are allowed as well.

    Args:
        counts: members of each kind, one or more.
        cost: of a member of kind `i` followed by one of kind `j`.
    """
    kinds = range(len(counts))
    if sum(counts) == 1:
        return 0.0
    in_blocks = max(
        *(cost[i][i] for i in kinds if counts[i] > 1),
        *(cost[i][j] for i, j in pairwise(kinds)),
        0.0,
        0.0,
    )
    limits = sorted({cost[i][j] for i in kinds for j in kinds if cost[i][j] < in_blocks})
    low, high = 0, len(limits)
    while low < high:
        middle = (low + high) // 2
        if _has_walk(counts, cost, limits[middle]):
            high = middle
        else:
            low = middle + 1
    return limits[low] if low < len(limits) else in_blocks


def _has_walk(counts: Sequence[int], cost: Sequence[Sequence[float]], limit: float) -> bool:
    """Whether a walk through all members is found whose arcs all cost at most `limit`."""
    start = len(counts)
    visits = [*counts, 1]
    allowed = {
        (i, j)
        for i, j in product(range(start + 1), repeat=2)
        if (i == start) != (j == start) or (start not in (i, j) and cost[i][j] <= limit)
    }
    arcs = _balanced(visits, allowed)
    return arcs is not None and _joined(arcs, allowed)


def _balanced(visits: Sequence[int], allowed: set[tuple[int, int]]) -> _Arcs | None:
    """How often each arc is taken so that every node is left and entered as often as visited."""
    graph = nx.DiGraph()
    for node, num in enumerate(visits):
        graph.add_edge("from", ("out", node), capacity=num)
        graph.add_edge(("in", node), "to", capacity=num)
    for i, j in sorted(allowed):
        graph.add_edge(("out", i), ("in", j))
    value, flow = nx.maximum_flow(graph, "from", "to")
    if value < sum(visits):
        return None
    return Counter({(i, j): flow["out", i]["in", j] for i, j in allowed if flow["out", i]["in", j]})


def _joined(arcs: _Arcs, allowed: set[tuple[int, int]]) -> bool:
    """Exchanges ends of arcs of two circuits until all are one; whether that succeeds."""
    while True:
        circuits = list(nx.weakly_connected_components(nx.DiGraph(list(arcs))))
        if len(circuits) == 1:
            return True
        of_node = {node: c for c, nodes in enumerate(circuits) for node in nodes}
        pairs = (
            ((a, b), (c, d))
            for (a, b), (c, d) in product(sorted(arcs), repeat=2)
            if of_node[a] < of_node[c] and (a, d) in allowed and (c, b) in allowed
        )
        found = next(pairs, None)
        if found is None:
            return False
        (a, b), (c, d) = found
        arcs.subtract([(a, b), (c, d)])
        arcs.update([(a, d), (c, b)])
        arcs = +arcs
