"""Sequences in groups, moved and exchanged while that lowers the busiest group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megatron_hetero.sequences.deal.price_table import PriceTable
from megatron_hetero.sequences.price.group_price import Floats

_GAIN = 1e-9
_MAX_MOVES = 400
_TIE = 1e-7
_LOOKED_AT = 50


class PackedGroups:
    """Groups with an option and sequences each, of one micro-batch or several.

    `micro_batch[g]` is the number of the micro-batch of group g.  What is lowered is the sum, over
    micro-batches, of the seconds of the busiest group.
    """

    def __init__(
        self, table: PriceTable, options: Sequence[int], micro_batch: Sequence[int] | None = None
    ) -> None:
        self.table = table
        self.micro_batch = np.asarray(
            [0] * len(options) if micro_batch is None else micro_batch, dtype=np.int64
        )
        self._num_batches = int(self.micro_batch.max(initial=0)) + 1
        self.options = np.asarray(options, dtype=np.int64)
        num_groups, num_sequences = len(self.options), len(table.lengths)
        self.group_of = np.full(num_sequences, -1, dtype=np.int64)
        self.seconds: Floats = np.zeros(num_groups)
        """Of each group, without its fixed seconds."""
        most_rows = max(rows.stop - rows.start for rows in table.rows)
        # Rows that an option does not have take nothing and hold anything.
        # [group, row, sequence] and [group, row].
        self._need = np.zeros((num_groups, most_rows, num_sequences))
        self._room = np.ones((num_groups, most_rows))
        for g, option in enumerate(self.options):
            rows = table.rows[option]
            count = rows.stop - rows.start
            self._need[g, :count] = table.memory[rows]
            self._room[g, :count] = table.room[rows] * (1 + 1e-9)
        self._used = np.zeros((num_groups, most_rows))
        self._cost = table.seconds[self.options]
        self._fixed_s = table.fixed_s[self.options]

    @property
    def busiest_s(self) -> float:
        """Return the seconds of the busiest group, summed over micro-batches."""
        return float(self._tops(self._done()).sum())

    def _done(self) -> Floats:
        """Return the seconds of each group; 0 where it has no sequence."""
        # A group without sequences does no pass, hence pays no fixed seconds.
        return np.where(self.seconds > 0, self.seconds + self._fixed_s, 0.0)

    def _tops(self, done: Floats) -> Floats:
        """Return the seconds of the busiest group of each micro-batch."""
        tops = np.zeros(self._num_batches)
        np.maximum.at(tops, self.micro_batch, done)
        return tops

    def members(self, group: int) -> npt.NDArray[np.int64]:
        """Return the sequences of a group."""
        return np.flatnonzero(self.group_of == group)

    def of(self, sequences: Sequence[int]) -> PackedGroups:
        """Return the same groups with these sequences alone, numbered in this order."""
        found = PackedGroups(
            self.table.of(sequences),
            [int(w) for w in self.options],
            [int(m) for m in self.micro_batch],
        )
        for number, sequence in enumerate(sequences):
            if self.group_of[sequence] >= 0:
                found.put(number, int(self.group_of[sequence]))
        return found

    def only(self, micro_batch: int, sequences: Sequence[int]) -> PackedGroups:
        """Return the groups of a micro-batch, renumbered; `sequences` are the micro-batch's
        sequences."""
        groups = np.flatnonzero(self.micro_batch == micro_batch)
        found = PackedGroups(self.table.of(sequences), [int(self.options[g]) for g in groups])
        place = {int(g): i for i, g in enumerate(groups)}
        for number, sequence in enumerate(sequences):
            found.put(number, place[int(self.group_of[sequence])])
        return found

    def put(self, sequence: int, group: int) -> None:
        """Put a sequence without a group into a group."""
        self.group_of[sequence] = group
        self.seconds[group] += self._cost[group, sequence]
        self._used[group] += self._need[group, :, sequence]

    def place(
        self,
        sequence: int,
        among: npt.NDArray[np.int64],
        in_time_s: float | None = None,
    ) -> bool:
        """Give a sequence to a group with room; False where none has any.

        Args:
            sequence: that has no group.
            among: numbers of groups.
            in_time_s: the fullest group that is done in this time; None is the one that is done
                first.
        """
        if not len(among):
            return False
        # Memory of every member of a group, and when the group would be done.
        used = self._used[among] + self._need[among, :, sequence]
        fits = (used <= self._room[among]).all(axis=1)
        done = self.seconds[among] + self._fixed_s[among] + self._cost[among, sequence]
        # The one that is done first, or the fullest that is done in time.
        if in_time_s is None:
            rank = done
        else:
            fits &= done <= in_time_s
            rank = -(used / self._room[among]).max(axis=1)
        rank = np.where(fits & np.isfinite(done), rank, np.inf)
        best = int(np.argmin(rank))
        if not np.isfinite(rank[best]):
            return False
        self.put(sequence, int(among[best]))
        return True

    def improve(self, enough_s: float, max_moves: int = _MAX_MOVES) -> None:
        """Move or exchange sequences of the busiest groups while that lowers the sum: of the
        longest micro-batch as long as that helps, then of the next, and so on.

        Args:
            enough_s: stop when the sum is no more.
            max_moves: stop after so many.
        """
        longest_first = np.argsort(-self._tops(self._done()), kind="stable")
        moves, at, has_helped = 0, 0, False
        # Each pass improves the busiest group of one micro-batch, or goes on to the next
        # micro-batch.
        while moves < max_moves and at < len(longest_first):
            done = self._done()
            tops = self._tops(done)
            if tops.sum() <= enough_s:
                return
            own = self.micro_batch == longest_first[at]
            busiest = int(np.argmax(np.where(own, done, -1.0)))
            others = own & (np.arange(len(done)) != busiest)
            second = float(done[others].max(initial=0.0))
            if self._move(busiest, second, done, tops) or self._exchange(
                busiest, second, done, tops
            ):
                moves, has_helped = moves + 1, True
            else:
                # What shortened this one may have made room for longer ones.
                at, has_helped = (0 if has_helped and at else at + 1), False

    def _move(self, busiest: int, second: float, done: Floats, tops: Floats) -> bool:
        """Make the best move of one sequence out of a busiest group; False where none helps.

        Args:
            busiest: the group.
            second: seconds of the second busiest group of its micro-batch.
            done: seconds of each group.
            tops: seconds of each micro-batch.
        """
        own = self.members(busiest)
        if not len(own):
            return False
        number = self.micro_batch[busiest]
        # When every group would be done with each of the busiest group's sequences, and if it has
        # room.
        # [group, own sequence], both.
        after = self.seconds[:, None] + self._cost[:, own] + self._fixed_s[:, None]
        fits = (self._used[:, :, None] + self._need[:, :, own] <= self._room[:, :, None]).all(1)
        fits[busiest] = False
        # What the busiest group keeps; the second busiest sets the pace then.
        left = done[busiest] - self._cost[busiest, own]
        # A group that gives its only sequence away is done at once.
        if len(own) == 1:
            left = np.zeros(1)
        remaining = np.maximum(left, second)[None, :]
        # A move inside the micro-batch changes one maximum, a move out of it two.
        is_here = (self.micro_batch == number)[:, None]
        # [group, own sequence]: what the move adds to the target's micro-batch.
        there = np.where(is_here, 0.0, np.maximum(after - tops[self.micro_batch][:, None], 0.0))
        here = np.where(is_here, np.maximum(after, remaining), remaining)
        # Of moves that gain the same, one that leaves the lower group.
        gain = np.where(fits, tops[number] - here - there, -np.inf)
        gain = np.where(fits, gain - _TIE * np.maximum(after, left[None, :]), -np.inf)
        # The best group and the place of its sequence in `own`.
        group, place = np.unravel_index(int(np.argmax(gain)), gain.shape)
        if not gain[group, place] > _GAIN * done[busiest]:
            return False
        self._take(int(own[place]))
        self.put(int(own[place]), int(group))
        return True

    def _exchange(self, busiest: int, second: float, done: Floats, tops: Floats) -> bool:
        """Make the best exchange of a sequence of a busiest group for one of another group.

        Args: as of `_move`.
        """
        own = self.members(busiest)
        others = np.flatnonzero((self.group_of != busiest) & (self.group_of >= 0))
        if not len(others) or not len(own):
            return False
        # Seconds of both groups after each exchange.
        theirs = self.group_of[others]
        number = self.micro_batch[busiest]
        given = self._cost[busiest, own][:, None]
        # [own sequence, other sequence], both.
        mine = done[busiest] - given + self._cost[busiest, others][None, :]
        yours = (
            done[theirs][None, :]
            - self._cost[theirs, others][None, :]
            + self._cost[np.ix_(theirs, own)].T
        )
        # The step's change, as for a move.
        is_here = (self.micro_batch[theirs] == number)[None, :]
        # What the exchange adds to the other micro-batch.
        more = np.where(
            is_here, 0.0, np.maximum(yours - tops[self.micro_batch[theirs]][None, :], 0.0)
        )
        remaining = np.maximum(mine, second)
        here = np.where(is_here, np.maximum(yours, remaining), remaining)
        gain = tops[number] - here - more - _TIE * np.maximum(mine, yours)
        gain = np.where(np.isfinite(gain), gain, -np.inf).ravel()
        # The best exchanges are looked at for memory one by one.
        flat = np.flatnonzero(gain > _GAIN * done[busiest])
        for at in flat[np.argsort(-gain[flat], kind="stable")][:_LOOKED_AT]:
            a, b = divmod(int(at), len(others))
            one, other, group = int(own[a]), int(others[b]), int(theirs[b])
            if self._exchange_fits(one, busiest, other, group):
                self._take(one)
                self._take(other)
                self.put(one, group)
                self.put(other, busiest)
                return True
        return False

    def _exchange_fits(self, one: int, here: int, other: int, there: int) -> bool:
        used_here = self._used[here] - self._need[here, :, one] + self._need[here, :, other]
        used_there = self._used[there] - self._need[there, :, other] + self._need[there, :, one]
        return bool(
            (used_here <= self._room[here]).all() and (used_there <= self._room[there]).all()
        )

    def _take(self, sequence: int) -> None:
        group = self.group_of[sequence]
        self.group_of[sequence] = -1
        own = self.members(int(group))
        # Summed anew: differences would leave a rest of rounding.
        self.seconds[group] = self._cost[group, own].sum()
        self._used[group] = self._need[group][:, own].sum(axis=1)
