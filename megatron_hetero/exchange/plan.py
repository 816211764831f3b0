"""An exchange as data: rounds of transfers between the holders of a buffer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Purpose = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Transfer(NamedTuple):
    """Elements `start:stop` from a holder to a second holder, added to the receiver's elements or,
    without `reduces`, replacing the receiver's."""

    round: int
    source: int
    destination: int
    start: int
    stop: int
    reduces: bool


class Owned(NamedTuple):
    """Elements `start:stop` that a holder has in full after a reduce-scatter, and gives in an
    all-gather."""

    start: int
    stop: int
    holder: int


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Rounds of transfers.  In a round all holders send what they had before it.

    Attributes:
        name: of what made it, for people.
        purpose: what holders have in the end: all of the sum, their own parts of it, or all that
            the owners had.
        size: elements of the buffer.
        table: [transfer, (round, source, destination, start, stop, reduces)], by rounds.
        owners: of all elements, in order.
        num_chunks: between any two edges of ranges, elements are cut into so many equal parts, each
            of which goes through all rounds one round behind the part before it, so that links that
            different rounds use work at the same time.
    """

    name: str
    purpose: Purpose
    num_holders: int
    size: int
    table: Ints
    owners: tuple[Owned, ...]
    num_chunks: int = 1

    @property
    def num_rounds(self) -> int:
        """Count the rounds of one chunk."""
        return int(self.table[-1, 0]) + 1 if len(self.table) else 0

    @property
    def num_rounds_in_all(self) -> int:
        """Count the rounds until the last chunk is done."""
        return self.num_rounds + self.num_chunks - 1 if len(self.table) else 0

    @property
    def num_messages(self) -> int:
        """Count the messages: what one holder sends another in a round is one."""
        return len(np.unique(self.table[:, :3], axis=0)) * self.num_chunks

    def transfers(self) -> Iterator[Transfer]:
        """Yield the transfers of one chunk."""
        columns = self.table[:, :5].T.tolist()
        return map(Transfer, *columns, (self.table[:, 5] != 0).tolist())

    def expanded(self) -> ExchangePlan:
        """Return the same plan with every chunk written out."""
        if self.num_chunks == 1:
            return self
        # Every edge of any range is a cut; [cut], elements.
        cuts = np.unique(self.table[:, 3:5])
        first, last = (np.searchsorted(cuts, self.table[:, i]) for i in (3, 4))
        # One row for each piece between two cuts, of the transfer `row`.
        row, piece = pieces_of(first, last)
        start = cuts[piece]
        width = cuts[piece + 1] - start
        # Chunk c of every piece goes through the same rounds, c rounds later.
        parts = []
        for chunk in range(self.num_chunks):
            part = self.table[row]
            part[:, 0] += chunk
            part[:, 3] = start + width * chunk // self.num_chunks
            part[:, 4] = start + width * (chunk + 1) // self.num_chunks
            # Pieces with fewer elements than chunks leave some chunks empty.
            parts.append(part[part[:, 4] > part[:, 3]])
        return replace(self, table=_sorted(np.concatenate(parts)), num_chunks=1)

    def most_received(self, num_chunks: int = 1) -> int:
        """Return the most elements that a holder receives in a round with so many chunks, rounded
        up: what its buffers must hold."""
        if not len(self.table):
            return 0
        # One bin for each round and receiver.
        place = self.table[:, 0] * self.num_holders + self.table[:, 2]
        width = self.table[:, 4] - self.table[:, 3]
        got = np.bincount(place, width, self.num_rounds * self.num_holders)
        # [round, holder]: a window of `num_chunks` rounds is a difference of running sums.
        sums = np.cumsum(got.reshape(self.num_rounds, self.num_holders), axis=0)
        before = np.zeros_like(sums)
        before[num_chunks:] = sums[:-num_chunks]
        return ceil(float((sums - before).max()) / num_chunks)

    @cached_property
    def sent(self) -> Ints:
        """Return [holder] -> number of elements sent."""
        width = self.table[:, 4] - self.table[:, 3]
        return np.bincount(self.table[:, 1], width, self.num_holders).astype(np.int64)


def pieces_of(first: Ints, last: Ints) -> tuple[Ints, Ints]:
    """Write ranges of pieces out.

    Args:
        first: [range], its first piece.
        last: [range], the piece behind its last.

    Returns:
        [piece of a range]: the range, and the piece; ranges in order, each one's pieces in order.
    """
    num = last - first
    row = np.repeat(np.arange(len(num)), num)
    return row, np.arange(len(row)) + np.repeat(first - np.cumsum(num) + num, num)


def _sorted(table: Ints) -> Ints:
    return table[np.lexsort(table.T[::-1])]


def plan_of(
    name: str,
    purpose: Purpose,
    num_holders: int,
    size: int,
    reducing: Sequence[Sequence[int]] | Ints,
    owners: Sequence[Owned],
) -> ExchangePlan:
    """Make a plan from its reduce-scatter: an all-gather is the same backwards, an all-reduce one
    after the other.

    Args:
        name: of what makes it.
        purpose: which of the three.
        num_holders: of the buffer.
        size: elements of the buffer.
        reducing: (round, source, destination, start, stop) of a reduce-scatter.
        owners: where it leaves the sums.
    """
    # Forward rounds reduce; backward rounds copy the other way, last round first.
    rows = np.asarray(reducing, np.int64).reshape(-1, 5)
    ones = np.ones((len(rows), 1), np.int64)
    forward = np.hstack([rows, ones])
    last = int(rows[:, 0].max(initial=-1))
    backward = np.hstack([rows[:, [0, 2, 1, 3, 4]], 0 * ones])
    backward[:, 0] = last - backward[:, 0]
    # Join what the purpose needs.
    if purpose == "reduce_scatter":
        table = forward
    elif purpose == "all_gather":
        table = backward
    else:
        backward[:, 0] += last + 1
        table = np.concatenate([forward, backward])
    return ExchangePlan(name, purpose, num_holders, size, _sorted(table), tuple(owners))
