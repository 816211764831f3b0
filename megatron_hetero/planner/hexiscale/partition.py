"""Multilevel partition of a weighted graph into parts of given sizes.

Hendrickson and Leland 1995, Karypis and Kumar 1998: coarsen by heavy-edge matching, bisect the
coarsest graph by growing a part, refine while projecting back (Fiduccia and Mattheyses 1982), and
bisect again until there are as many parts as wanted.  Deterministic: ties go to the smaller index.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_hetero.rounding import ROUNDING

Weights = NDArray[np.float64]
Side = NDArray[np.bool_]

_COARSEST = 24
"""Vertices below which a graph is bisected directly."""


def partition(
    vertex_weights: Sequence[float], edge_weights: Weights, num_parts: int
) -> tuple[tuple[int, ...], ...]:
    """Return parts of about equal vertex weight with a small weight of edges between them.

    Args:
        edge_weights: symmetric, zero on the diagonal, shape [vertex, vertex].
        num_parts: from 1 to the number of vertices.
    Returns:
        The vertices of each part, ascending; no part is empty.
    """
    weights = np.asarray(vertex_weights, dtype=np.float64)
    parts = _divide(np.arange(len(weights)), weights, edge_weights, num_parts)
    return tuple(sorted(tuple(int(vertex) for vertex in part) for part in parts))


def _divide(
    vertices: NDArray[np.intp], weights: Weights, edges: Weights, num_parts: int
) -> list[NDArray[np.intp]]:
    if num_parts == 1:
        return [vertices]
    # Bisect in the proportion of the numbers of parts, then divide both sides further.
    low = num_parts // 2
    side = _bisect(
        weights[vertices],
        edges[np.ix_(vertices, vertices)],
        low / num_parts,
        (low, num_parts - low),
    )
    return _divide(vertices[~side], weights, edges, low) + _divide(
        vertices[side], weights, edges, num_parts - low
    )


def _bisect(weights: Weights, edges: Weights, share: float, least: tuple[int, int]) -> Side:
    """Return which vertices are on the second side; the first one gets `share` of all weight.

    `least`: vertices that each side has to keep, so that it can be divided further.
    """
    # Small enough to be bisected directly.
    if len(weights) <= max(_COARSEST, 2 * sum(least)):
        return _refine(_grow(weights, edges, share, least), weights, edges, share, least)
    owner = _match(edges)
    num_coarse = int(owner.max()) + 1
    # Matching has found nothing, or has left too few vertices.
    if num_coarse < sum(least) or num_coarse == len(weights):
        return _refine(_grow(weights, edges, share, least), weights, edges, share, least)
    coarse_weights = np.bincount(owner, weights)
    # [coarse vertex, vertex]: sums the edges of matched vertices.
    project = np.zeros((num_coarse, len(weights)))
    project[owner, np.arange(len(weights))] = 1
    coarse_edges = project @ edges @ project.T
    np.fill_diagonal(coarse_edges, 0)
    # Sides of coarse vertices are sides of their members; refine where the graph is finer.
    side = _bisect(coarse_weights, coarse_edges, share, (1, 1))[owner]
    return _refine(side, weights, edges, share, least)


def _match(edges: Weights) -> NDArray[np.intp]:
    """Match by heavy edges: the coarse vertex of each vertex."""
    owner = np.full(len(edges), -1)
    num_coarse = 0
    for vertex in range(len(edges)):
        if owner[vertex] >= 0:
            continue
        free = owner < 0
        free[vertex] = False
        owner[vertex] = num_coarse
        if free.any():
            # Of equal edges `argmax` takes the lowest index, which keeps the matching
            # deterministic.
            heaviest = np.where(free, edges[vertex], -1.0)
            owner[int(heaviest.argmax())] = num_coarse
        num_coarse += 1
    return owner


def _grow(weights: Weights, edges: Weights, share: float, least: tuple[int, int]) -> Side:
    """Go on from the vertex with the fewest ties, what is tied most, until the first side is
    full."""
    side = np.ones(len(weights), dtype=bool)
    wanted = share * weights.sum()
    # The first vertex is the one with the fewest ties.
    held, ties = 0.0, -edges.sum(axis=1)
    for taken in range(len(weights) - least[1]):
        vertex = int(np.where(side, ties, -np.inf).argmax())
        # Growth ends at a vertex of which more than half would be beyond the wanted weight.
        if taken >= least[0] and held + weights[vertex] / 2 > wanted:
            break
        # From the second vertex on, ties to the first side decide.
        if taken == 0:
            ties = np.zeros(len(weights))
        side[vertex] = False
        held += weights[vertex]
        ties = ties + edges[vertex]
    return side


def _refine(
    side: Side, weights: Weights, edges: Weights, share: float, least: tuple[int, int]
) -> Side:
    """Passes of single moves, each vertex once a pass, kept up to the best point of the pass.

    A point is better if its sides are nearer to their sizes, as far as they are off by more than
    half the heaviest vertex, and then if it cuts less.
    """
    wanted, room = share * weights.sum(), weights.max() / 2
    slack = ROUNDING * float(weights.max())
    while True:
        moved, order = side.copy(), []
        held = float(weights[~side].sum())
        # Gain of moving a vertex: what ties it to the other side, less what ties it to its own.
        signs = np.where(side, 1.0, -1.0)
        gains = -signs * (edges @ signs)
        cut, locked = 0.0, np.zeros(len(weights), dtype=bool)
        best = (max(abs(held - wanted) - room, 0.0), 0.0)
        num_best = 0
        # Move the best allowed vertex, even at a loss, and lock it.
        for _ in range(len(weights)):
            counts = int((~moved).sum()), int(moved.sum())
            after = held + np.where(moved, weights, -weights)
            # How far each move would leave the sides off their sizes, beyond half the heaviest
            # vertex.
            off = np.maximum(np.abs(after - wanted) - room, 0.0)
            allowed = ~locked & np.where(moved, counts[1] > least[1], counts[0] > least[0])
            # A move may leave the balance by one vertex: exchanges pass through such a point.
            allowed &= off <= max(best[0], float(weights.max()))
            if not allowed.any():
                break
            vertex = int(np.where(allowed, gains - off * ROUNDING, -np.inf).argmax())
            # Its neighbours' gains change.
            cut -= float(gains[vertex])
            held = float(after[vertex])
            gains[vertex] = -gains[vertex]
            same = moved == moved[vertex]
            change = 2 * edges[vertex] * np.where(same, 1.0, -1.0)
            change[vertex] = 0.0
            gains = gains + change
            moved[vertex] = not moved[vertex]
            locked[vertex] = True
            order.append(vertex)
            # Remember the best point of the pass.
            point = (float(off[vertex]), cut)
            # Rounding is no gain: passes that undo each other would never end.
            is_nearer = point[0] < best[0] - slack
            cuts_less = point[1] < best[1] - ROUNDING * (1 + abs(best[1]))
            if is_nearer or (point[0] <= best[0] + slack and cuts_less):
                best, num_best = point, len(order)
        # No better point: done. Otherwise keep the moves up to it.
        if not num_best:
            return side
        side = side.copy()
        side[order[:num_best]] = ~side[order[:num_best]]
