"""Like groups exchanged among replicas and stages, so that the busiest path between two nodes, or
the busiest line that paths share, carries less.

Replicas that are laid out alike often send all their activations from one node to one other, while
as good a path between two like nodes is idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from megatron_hetero.planner.moves.like_groups import like_places
from megatron_hetero.planner.problem import Chain, Problem, Unit
from megatron_hetero.planner.shapes.crowding import Path, PathTraffic, Place
from megatron_hetero.rounding import ROUNDING

_MAX_WORK = 20_000
"""Exchanges to look at, for all chains."""


class Spreader:
    """Exchanges groups; remembers what it did for which chains.

    Args:
        kind_of: by node; groups of one kind and width may be exchanged.
    """

    def __init__(self, problem: Problem, kind_of: Mapping[str, int]) -> None:
        self.problem = problem
        self.kind_of = kind_of
        self.work = 0
        """Exchanges looked at."""
        self._known: dict[tuple[tuple[Chain, ...], tuple[int, ...]], list[Chain] | None] = {}

    def spread(self, chains: Sequence[Chain], micro_batches: Sequence[int]) -> list[Chain] | None:
        """Return the chains with groups exchanged; None if that relieves no path.

        Steepest descent of the sum of squares of the seconds for which paths are taken; each step
        exchanges a group that uses the busiest path.

        Args:
            micro_batches: of each chain.
        """
        key = tuple(chains), tuple(micro_batches)
        if key not in self._known and self.work < _MAX_WORK:
            self._known[key] = self._spread(*key)
        return self._known.get(key)

    def _spread(self, chains: Sequence[Chain], micro_batches: Sequence[int]) -> list[Chain] | None:
        traffic = _SpreadTraffic(self.problem, chains, micro_batches)
        moved = False
        while traffic.seconds and self.work < _MAX_WORK:
            least = ROUNDING * sum(s * s for s in traffic.seconds.values())
            best: tuple[float, Place, Place] | None = None
            for one, other in traffic.exchanges(self.kind_of):
                self.work += 1
                relief = traffic.relief(one, other)
                if relief > least and (best is None or relief > best[0]):
                    best = relief, one, other
            if best is None:
                break
            traffic.exchange(*best[1:])
            moved = True
        return [tuple(chain) for chain in traffic.chains] if moved else None


class _SpreadTraffic(PathTraffic):
    """What groups exchanged change of it."""

    def exchanges(self, kind_of: Mapping[str, int]) -> Iterator[tuple[Place, Place]]:
        """Yield pairs of like groups on unlike nodes, the first of which uses the busiest path."""
        busiest = max(self.seconds, key=lambda path: (self.seconds[path], str(path)))
        for places in like_places(self.chains, kind_of):
            for r, s in places:
                near = pairwise(self.chains[r][max(s - 1, 0) : s + 2])
                if not any(self._takes(a, b, busiest) for a, b in near):
                    continue
                for q, t in places:
                    if self.chains[r][s].node != self.chains[q][t].node:
                        yield (r, s), (q, t)

    def _takes(self, one: Unit, other: Unit, path: Path) -> bool:
        """Return whether the boundary between two groups takes a path, there or back."""
        if one.node == other.node or one.beyond or other.beyond:
            return False
        both = (*self.message(one, other), *self.message(other, one))
        return any(taken == path for taken, _ in both)

    def exchange(self, one: Place, other: Place) -> None:
        """Exchange two groups."""
        for path, seconds in self._change(one, other).items():
            self.seconds[path] = self.seconds.get(path, 0.0) + seconds
        self._swap(one, other)

    def relief(self, one: Place, other: Place) -> float:
        """Return by how much the sum of squares falls if two groups are exchanged."""
        change = self._change(one, other)
        before = [self.seconds.get(path, 0.0) for path in change]
        more = zip(before, change.values(), strict=True)
        return -sum(seconds * (2 * own_s + seconds) for own_s, seconds in more)

    def _change(self, one: Place, other: Place) -> dict[Path, float]:
        boundaries = [
            (r, boundary)
            for r, s in (one, other)
            for boundary in (s - 1, s)
            if 0 <= boundary < len(self.chains[r]) - 1
        ]
        found: dict[Path, float] = {}
        for sign in (-1, 1):
            for boundary in dict.fromkeys(boundaries):
                self.add(found, boundary, sign)
            self._swap(one, other)  # and, the second time, back
        return found

    def _swap(self, one: Place, other: Place) -> None:
        (r, s), (q, t) = one, other
        chains = self.chains
        chains[r][s], chains[q][t] = chains[q][t], chains[r][s]
