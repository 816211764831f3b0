"""Cost of sequences on a group of ranks, from any source.

A group trains all of its sequences of a micro-batch in one packed forward and backward: it takes
`fixed_s` once, and for each sequence the seconds that its length asks for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class GroupPrice(Protocol):
    """Seconds and memory of sequences on a group of `size` ranks, trained together.

    Memory has as many rows as the group has unlike members; `room[i]` is what row i may sum to, in
    the unit of `memory` (bytes, or tokens where every token takes the same).
    """

    @property
    def name(self) -> str:
        """Return the words for people: the exchange, and the shares where they are unlike."""

    @property
    def size(self) -> int:
        """Return the number of ranks."""

    @property
    def fixed_s(self) -> float:
        """Return the seconds of a packed forward and backward, however little is in it."""

    @property
    def room(self) -> Sequence[float]:
        """Return the most memory of each row."""

    def seconds(self, lengths: Floats) -> Floats:
        """Return the seconds that each sequence adds, shape [sequence]; infinite where it does not
        fit alone."""

    def memory(self, lengths: Floats) -> Floats:
        """Return the memory that each sequence takes, shape [row, sequence]."""


def holds(price: GroupPrice, lengths: Floats) -> npt.NDArray[np.bool_]:
    """Return which sequences fit on the group alone, shape [sequence]."""
    # The tolerance is for memory that is a sum of rounded parts.
    room = np.asarray(price.room)[:, None]
    fits = (price.memory(lengths) <= room * (1 + 1e-12)).all(axis=0)
    return np.asarray(fits & np.isfinite(price.seconds(lengths)))


def longest_sequence(price: GroupPrice, most: int = 1 << 30) -> int:
    """Return the longest sequence that fits on the group alone, in tokens; 0 where none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if holds(price, np.array([float(middle)]))[0]:
            low = middle
        else:
            high = middle - 1
    return low


def undominated(prices: Sequence[GroupPrice], lengths: Floats) -> tuple[GroupPrice, ...]:
    """Leave out prices of a group that are never better than another price of the group.

    Args:
        prices: of one group, each with another exchange or other shares.
        lengths: sequences at which they are compared, the longest that fits among them.
    """
    seen: list[GroupPrice] = []
    table = [(p, p.seconds(lengths), _parts_of_room(p, lengths)) for p in prices]

    # The later of two equal prices is the worse one, so that one of both stays.
    def is_worse(i: int, j: int) -> bool:
        (one, seconds, parts), (other, others, least) = table[i], table[j]
        no_better = bool(
            one.fixed_s >= other.fixed_s and (seconds >= others).all() and (parts >= least).all()
        )
        same = one.fixed_s == other.fixed_s and bool((seconds == others).all())
        return no_better and (not same or j < i or bool((parts > least).any()))

    for i, price in enumerate(prices):
        if not any(is_worse(i, j) for j in range(len(prices)) if j != i):
            seen.append(price)
    return tuple(seen)


def _parts_of_room(price: GroupPrice, lengths: Floats) -> Floats:
    """Return the part of the fullest member filled by each sequence."""
    # A member without room is full with any sequence; the floor keeps the division defined.
    parts = price.memory(lengths) / np.maximum(np.asarray(price.room)[:, None], 1e-300)
    return np.asarray(parts.max(axis=0))
