"""The order of a few places with the least time between neighbours: a path through all of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from megatron_hetero.rounding import at_most

_MAX_EXACT = 10
"""Up to here by dynamic programming over sets (Held and Karp 1962), above it greedily."""


def shortest_paths(seconds: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """Return the shortest path through all places; several where they begin at other places and
    tie.

    Args:
        seconds: symmetric, shape [place, place].
    Returns:
        Orders of all places, at least one; a path and its reverse count as one.
    """
    num_places = len(seconds)
    if num_places == 1:
        return [(0,)]
    paths = _exact(seconds) if num_places <= _MAX_EXACT else _greedy(seconds)
    shortest = min(_length(seconds, path) for path in paths)
    found = {min(w, w[::-1]) for w in paths if at_most(_length(seconds, w), shortest)}
    return sorted(found)


def _exact(seconds: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """Return the shortest path that ends at each place."""
    num_places = len(seconds)
    # (set of places as bits, last place) -> length and path.
    best: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {
        (1 << i, i): (0.0, (i,)) for i in range(num_places)
    }
    for _ in range(num_places - 1):
        grown: dict[tuple[int, int], tuple[float, tuple[int, ...]]] = {}
        for (held, end), (length_s, path) in best.items():
            for place in range(num_places):
                if not held >> place & 1:
                    key = (held | 1 << place, place)
                    # Comparing the paths too makes ties independent of the order of the dictionary.
                    option = (length_s + seconds[end][place], (*path, place))
                    if key not in grown or option < grown[key]:
                        grown[key] = option
        best = grown
    return [path for _, path in best.values()]


def _greedy(seconds: Sequence[Sequence[float]]) -> list[tuple[int, ...]]:
    """Go from every place to the nearest place left."""
    paths = []
    for start in range(len(seconds)):
        path, left = [start], set(range(len(seconds))) - {start}
        while left:
            here = seconds[path[-1]]
            path.append(min(left, key=lambda place: (here[place], place)))
            left.remove(path[-1])
        paths.append(tuple(path))
    return paths


def _length(seconds: Sequence[Sequence[float]], path: Sequence[int]) -> float:
    return sum(seconds[a][b] for a, b in pairwise(path))
