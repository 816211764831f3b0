"""A deal as data: which group of ranks trains which sequences, micro-batch by micro-batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from megatron_hetero.errors import InfeasiblePlanError, PlanFormatError
from megatron_hetero.sequences.tree import GroupTree, step_seconds

Method = Literal["search", "greedy"]


@dataclass(frozen=True)
class DealtGroup:
    """Ranks `first` to `stop - 1` train `sequences` (numbers in the batch) in one packed forward
    and backward of `seconds`; `price` is the number of the option among those of its kind."""

    first: int
    stop: int
    kind: int
    price: int
    sequences: tuple[int, ...]
    seconds: float

    @property
    def size(self) -> int:
        """Return the number of ranks."""
        return self.stop - self.first


@dataclass(frozen=True)
class MicroBatch:
    """Groups that work side by side; the next micro-batch begins when the slowest is done.

    No deal of these sequences takes less than `bound_s`.  `reason` says why the greedy deal was
    taken, where it was.
    """

    groups: tuple[DealtGroup, ...]
    bound_s: float
    method: Method
    reason: str = ""

    @property
    def seconds(self) -> float:
        """Return the seconds of the slowest group."""
        return max(group.seconds for group in self.groups)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks of the groups, largest first."""
        return tuple(sorted((group.size for group in self.groups), reverse=True))

    @property
    def sequences(self) -> tuple[int, ...]:
        """Return the numbers of all sequences, ascending."""
        return tuple(sorted(k for group in self.groups for k in group.sequences))


@dataclass(frozen=True)
class Deal:
    """One step.  `least_s`: what no division into micro-batches and no deal can be faster than;
    `bound_s` is for the micro-batches as they were cut.  `other_stages` is
    `GroupTree.most_other_stages`."""

    micro_batches: tuple[MicroBatch, ...]
    least_s: float
    num_ranks: int
    other_stages: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of all micro-batches in a row."""
        return step_seconds([m.seconds for m in self.micro_batches], self.other_stages)

    @property
    def bound_s(self) -> float:
        """Return a lower bound of every deal of these micro-batches."""
        return step_seconds([m.bound_s for m in self.micro_batches], self.other_stages)

    @property
    def balance(self) -> float:
        """Return the seconds of the busiest rank over their mean; 1 is level."""
        busy = np.zeros(self.num_ranks)
        for micro_batch in self.micro_batches:
            for group in micro_batch.groups:
                busy[group.first : group.stop] += group.seconds
        return float(busy.max() / busy.mean())

    @property
    def idle(self) -> float:
        """Return the part of all ranks' time spent on waiting for the slowest group."""
        busy = sum(g.size * g.seconds for m in self.micro_batches for g in m.groups)
        return 1 - busy / (self.num_ranks * self.seconds)


TO_FIT = (
    "Cut it, leave it out, use --recompute-granularity full, --attention-dropout 0 (with dropout "
    "attention stores its scores, as many as the square of the length), or GPUs with more memory."
)
"""What helps against a sequence that no group holds."""


def check_lengths(
    tree: GroupTree, lengths: Sequence[int], names: Sequence[str] | None = None
) -> None:
    """Refuse sequences that no group can train.

    Args:
        tree: the groups of the job.
        lengths: of the sequences, in tokens.
        names: of their documents, for the message; None is "sequence 0" and so on.
    Raises:
        InfeasiblePlanError: a sequence is longer than any group can hold.
        PlanFormatError: there are none, or one is empty, or there are more or fewer names.
    """
    if names is not None and len(names) != len(lengths):
        raise PlanFormatError(f"{len(lengths)} lengths have {len(names)} names; give each one")
    if not lengths:
        raise PlanFormatError("there are no sequences to deal; a step needs at least one")
    for k, length in enumerate(lengths):
        name = names[k] if names is not None else f"sequence {k}"
        if length < 1:
            raise PlanFormatError(f"{name} has {length} tokens; a sequence has at least one")
        if length > tree.longest_sequence:
            raise InfeasiblePlanError(
                f"{name} has {length:,} tokens, and no group of the {tree.num_ranks} ranks holds "
                f"more than {tree.longest_sequence:,} in its memory. {TO_FIT}"
            )


def check_deal(tree: GroupTree, lengths: Sequence[int], deal: Deal) -> None:
    """Refuse a deal that does not match the sequences and groups.

    Args:
        tree: the groups of the job.
        lengths: of the batch's sequences, in tokens.
        deal: as computed or received.
    Raises:
        PlanFormatError: a sequence is missing or dealt twice, groups of a micro-batch share a rank
            or are none of the job's, or memory or seconds are not as the prices say.
    """
    # Every sequence once.
    dealt = Counter(k for m in deal.micro_batches for g in m.groups for k in g.sequences)
    for k in sorted(dealt.keys() | set(range(len(lengths)))):
        if not 0 <= k < len(lengths):
            raise PlanFormatError(f"the deal has sequence {k} of a batch of {len(lengths)}")
        if dealt[k] != 1:
            raise PlanFormatError(
                f"sequence {k} of {lengths[k]} tokens is dealt {dealt[k]} times, not once"
            )
    # Groups of the job, no rank twice, prices as computed.
    known = {(g.first, g.stop): g.kind for g in tree.groups}
    for number, micro_batch in enumerate(deal.micro_batches):
        where = f"micro-batch {number}"
        taken: set[int] = set()
        for group in micro_batch.groups:
            ranks = set(range(group.first, group.stop))
            here = f"{where}, ranks {group.first} to {group.stop - 1}"
            if known.get((group.first, group.stop)) != group.kind:
                raise PlanFormatError(f"{here}: this is no group of the job of kind {group.kind}")
            if taken & ranks:
                raise PlanFormatError(f"{here}: rank {min(taken & ranks)} is in another group too")
            taken |= ranks
            _check_group(tree, lengths, group, here)


def _check_group(tree: GroupTree, lengths: Sequence[int], group: DealtGroup, here: str) -> None:
    if not group.sequences:
        raise PlanFormatError(f"{here}: the group has no sequence")
    price = tree.kinds[group.kind].prices[group.price]
    own = np.array([float(lengths[k]) for k in group.sequences])
    used = price.memory(own).sum(axis=1)
    for row, (need, room) in enumerate(zip(used, price.room, strict=True)):
        if need > room * (1 + 1e-9):
            raise PlanFormatError(
                f"{here}: member {row} needs {need:.4g} of memory and has {room:.4g}"
            )
    seconds = price.fixed_s + float(price.seconds(own).sum())
    if abs(seconds - group.seconds) > 1e-6 * seconds:
        raise PlanFormatError(f"{here}: takes {seconds:.6g} s, not {group.seconds:.6g} s")
