"""The prices of the sequences of a micro-batch on every kind of group, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron_hetero.rounding import ROUNDING
from megatron_hetero.sequences.price.group_price import Floats
from megatron_hetero.sequences.tree import GroupTree


@dataclass(frozen=True)
class PriceTable:
    """Prices of sequences in every option of `tree.options`.

    Attributes:
        lengths: shape [sequence], tokens.
        fixed_s: shape [option].
        seconds: shape [option, sequence]; infinite where a sequence does not fit alone.
        memory: shape [row, sequence]; `rows[option]` has a row for each unlike member.
        room: shape [row].
    """

    tree: GroupTree
    lengths: Floats
    fixed_s: Floats
    seconds: Floats
    memory: Floats
    room: Floats
    rows: tuple[slice, ...]

    @cached_property
    def kind_of_option(self) -> npt.NDArray[np.int64]:
        """Return the number of each option's kind, shape [option]."""
        return np.array([kind for kind, _ in self.tree.options])

    @cached_property
    def size_of_option(self) -> npt.NDArray[np.int64]:
        """Return the number of ranks of each option's groups, shape [option]."""
        return np.array([price.size for _, price in self.tree.options])

    @cached_property
    def rank_seconds(self) -> Floats:
        """Return the least seconds of ranks that each sequence takes in any way, shape
        [sequence]."""
        return np.asarray((self.seconds * self.size_of_option[:, None]).min(axis=0))

    @cached_property
    def fullest(self) -> Floats:
        """Return the part of the fullest member filled by each sequence, [option, sequence]."""
        parts = self.memory / self.room[:, None]
        return np.array([parts[rows].max(axis=0) for rows in self.rows])

    @cached_property
    def ranks_filled(self) -> Floats:
        """Return how many ranks each sequence fills where it fills the fewest, shape [sequence]:
        the part of its members' memory, together, times their number."""
        filled = [
            self.memory[rows].sum(axis=0) / self.room[rows].sum() * size
            for rows, size in zip(self.rows, self.size_of_option, strict=True)
        ]
        return np.asarray(np.where(np.isfinite(self.seconds), filled, np.inf).min(axis=0))

    def fits(self, option: int, used: Floats) -> bool:
        """Return whether memory of `used`, shape [row of the option], is not more than there is."""
        return bool((used <= self.room[self.rows[option]] * (1 + ROUNDING)).all())

    def of(self, sequences: Sequence[int]) -> PriceTable:
        """Return the table of some of the sequences."""
        index = np.asarray(sequences, dtype=np.int64)
        return PriceTable(
            self.tree,
            self.lengths[index],
            self.fixed_s,
            self.seconds[:, index],
            self.memory[:, index],
            self.room,
            self.rows,
        )


def price_table(tree: GroupTree, lengths: Sequence[int] | Floats) -> PriceTable:
    """Price sequences in every option, infinite if too long for a group."""
    tokens = np.asarray(lengths, dtype=np.float64)
    rows, memories, seconds, rooms = [], [], [], []
    row = 0
    for _, price in tree.options:
        # [row, sequence], a row for each unlike member.
        memory = price.memory(tokens)
        room = np.asarray(price.room, dtype=np.float64)
        # Memory first: a price may give seconds for sequences that memory refuses.
        alone = (memory <= room[:, None] * (1 + ROUNDING)).all(axis=0)
        seconds.append(np.where(alone, price.seconds(tokens), np.inf))
        memories.append(memory)
        rooms.append(room)
        rows.append(slice(row, row + len(room)))
        row += len(room)
    return PriceTable(
        tree,
        tokens,
        np.array([price.fixed_s for _, price in tree.options]),
        np.array(seconds),
        np.concatenate(memories),
        np.concatenate(rooms),
        tuple(rows),
    )
