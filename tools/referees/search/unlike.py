"""The best placements without those that are nearly the same as a better one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_hetero.planner.evaluate.candidate import Candidate


def unlike(ranking: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return the best placements that differ in more than layers and micro-batches, and in more
    than which of like nodes is which."""
    chosen: dict[Hashable, Candidate] = {}
    images: set[Hashable] = set()
    for candidate in ranking:
        if len(chosen) == count:
            break
        image = candidate.step_time_s, candidate.contention, candidate.pattern
        if candidate.structure not in chosen and image not in images:
            chosen[candidate.structure] = candidate
            images.add(image)
    return list(chosen.values())
