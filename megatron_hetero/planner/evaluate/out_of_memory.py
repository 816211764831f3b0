"""Placements that lack memory: the one nearest to fitting, and the fastest of each shape."""

from __future__ import annotations

from collections.abc import Hashable

from megatron_hetero.planner.evaluate.candidate import NUM_KEPT, Candidate


class OutOfMemory:
    """Placements of one board without enough memory. If nothing fits, the nearest placement says
    what is missing; the fastest may fit with less memory and more time."""

    def __init__(self) -> None:
        self.nearest: Candidate | None = None
        """Lacks the fewest bytes."""
        self.nearest_stock: Candidate | None = None
        """Of those that stock Megatron can run."""
        self._fastest: dict[Hashable, Candidate] = {}

    @property
    def fastest(self) -> tuple[Candidate, ...]:
        """One of each shape, best first (a few dozen)."""
        return tuple(sorted(self._fastest.values(), key=lambda candidate: candidate.key))

    def keep(self, candidate: Candidate) -> None:
        """Take in a placement that lacks memory."""
        self.nearest = _nearer(candidate, self.nearest)
        if candidate.is_stock:
            self.nearest_stock = _nearer(candidate, self.nearest_stock)
        shape = candidate.structure
        known = self._fastest.get(shape)
        if known is None or candidate.step_time_s < known.step_time_s:
            self._fastest[shape] = candidate
        # Twice as many before a cut, so that cuts are rare.
        if len(self._fastest) > 2 * NUM_KEPT:
            self._fastest = {kept.structure: kept for kept in self.fastest[:NUM_KEPT]}


def _nearer(one: Candidate, other: Candidate | None) -> Candidate:
    return one if other is None or _order(one) < _order(other) else other


def _order(candidate: Candidate) -> tuple[int, object]:
    return candidate.cost.missing_bytes, candidate.key[-1]
