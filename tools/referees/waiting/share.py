"""What replicas have to do together, for the lower bound."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.referees.waiting.table import Floats, Ints

_NARROW = 1.01
"""Numbers of micro-batches this near to each other are taken together."""


@dataclass(frozen=True)
class Share:
    """What replicas have to do together.

    Each chain that does `counts[i]` micro-batches counts for `values[i]`; all replicas together
    need `demand`, and there are `fewest` to `most` of them.
    """

    counts: Ints
    values: Floats
    demand: float
    fewest: int
    most: int
    is_alike: bool

    @property
    def periods(self) -> float:
        """Periods of a stage that its cap counts: all further ones of a step where all replicas
        last equally long, else one."""
        return float(self.counts[0] - 1) if self.is_alike else 1.0

    @property
    def scales(self) -> Floats:
        """What a cap counts in a step, by count."""
        return np.array([1.0]) if self.is_alike else (self.counts - 1).astype(float)


def shares_of(num_micro_batches: int, fewest: int, most: int, alike: bool) -> Share:
    """`alike`: the replica with most micro-batches sets the pace of all."""
    if alike:
        count = -(-num_micro_batches // most)
        return Share(np.array([count]), np.array([1.0]), float(fewest), fewest, most, True)
    largest = num_micro_batches - fewest + 1
    counts = [1 if most > 1 else largest]
    while counts[-1] < largest:
        counts.append(min(largest, max(counts[-1] + 1, int(counts[-1] * _NARROW))))
    values = [*(after - 1 for after in counts[1:]), largest]
    return Share(
        np.array(counts), np.array(values, float), float(num_micro_batches), fewest, most, False
    )


def replica_ranges(most: int, wanted: int | None) -> list[tuple[int, int]]:
    """Numbers of replicas that are bounded together: 1, 2, 3 to 4, 5 to 8, ...; or the one that is
    wanted."""
    if wanted is not None:
        return [(wanted, wanted)]
    ranges, fewest, end = [], 1, 1
    while fewest <= most:
        ranges.append((fewest, min(end, most)))
        fewest, end = end + 1, 2 * end
    return ranges
