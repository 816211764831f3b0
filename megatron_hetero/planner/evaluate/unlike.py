"""The best placements without those that are nearly the same as a better one."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_hetero.planner.evaluate.candidate import LOW_CONTENTION, Candidate

_NUM_UNCONTENDED = 2


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


def unlike_and_uncontended(ranking: Sequence[Candidate], count: int) -> list[Candidate]:
    """Return `unlike`, and the best of those whose paths are not contended, which may be better
    than they look beside the others."""
    found = unlike(ranking, count)
    for contention in LOW_CONTENTION:
        uncontended = unlike(
            [candidate for candidate in ranking if candidate.contention <= contention],
            _NUM_UNCONTENDED,
        )
        found += [candidate for candidate in uncontended if candidate not in found]
    return found
