"""Proof of an exchange's purpose, with sets of holders in place of numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.exchange.plan import ExchangePlan, Ints, Transfer, pieces_of
from megatron_hetero.exchange.programmes import HolderRound, programmes, stuck

FaultKind = Literal["holder", "range", "owners", "twice", "clash", "missing", "deadlock", "buffers"]
Sets = npt.NDArray[np.uint64]
"""Sets of holders in the last dimension: a bit each, 64 to a word."""


@dataclass(frozen=True)
class ExchangeFault:
    """What is wrong with a plan, and where."""

    kind: FaultKind
    text: str


def require_exact(plan: ExchangePlan, max_received: float | None = None) -> None:
    """Refuse a plan with a fault.

    Args:
        plan: to be used.
        max_received: as in `faults`.

    Raises:
        PlanFormatError: names the first fault.
    """
    for fault in faults(plan, max_received):
        raise PlanFormatError(f"exchange plan {plan.name!r}: {fault.text}")


def faults(
    plan: ExchangePlan,
    max_received: float | None = None,
    of_holders: Sequence[Sequence[HolderRound]] | None = None,
) -> Iterator[ExchangeFault]:
    """Yield all faults of a plan; those of the first kind found may hide others.

    Every element of every holder is a set, at first of the holder alone.  A transfer that reduces
    joins two sets, which must have nothing in common; one that copies must bring something.

    Args:
        plan: its chunks are parts of the same ranges, so one of them stands for all.
        max_received: elements that a holder may receive in a round of the whole plan; None: any.
        of_holders: programmes to run in the place of the plan's own.
    """
    # A malformed plan proves nothing.
    malformed = list(_malformed(plan))
    if malformed:
        yield from malformed
        # The later checks index by holders and ranges, which a malformed plan lets run outside.
        return
    # It computes the right thing, it ends, and its buffers suffice.
    yield from _sets(plan)
    for holder, number in stuck(of_holders or programmes(plan)).items():
        yield ExchangeFault("deadlock", f"holder {holder} waits in round {number} for ever")
    num_received = plan.most_received(plan.num_chunks)
    if max_received is not None and num_received > max_received:
        yield ExchangeFault(
            "buffers",
            f"a holder receives {num_received} elements in a round; its buffers hold "
            f"{max_received:g}: more chunks need less",
        )


def _malformed(plan: ExchangePlan) -> Iterator[ExchangeFault]:
    """Check holders, ranges and owners by themselves."""
    ends, (start, stop) = plan.table[:, 1:3], plan.table[:, 3:5].T
    is_held = ((ends >= 0) & (ends < plan.num_holders)).all(axis=1)
    is_sent = ends[:, 0] != ends[:, 1]
    is_inside = (start >= 0) & (start < stop) & (stop <= plan.size)
    wrong = ~(is_held & is_sent & is_inside)
    for t, *is_right in zip(
        replace(plan, table=plan.table[wrong]).transfers(),
        is_held[wrong].tolist(),
        is_sent[wrong].tolist(),
        is_inside[wrong].tolist(),
        strict=True,
    ):
        if not is_right[0]:
            yield ExchangeFault("holder", f"{_words(t)}: there are {plan.num_holders} holders")
        elif not is_right[1]:
            yield ExchangeFault("holder", f"{_words(t)}: a holder sends nothing to itself")
        if not is_right[2]:
            yield ExchangeFault("range", f"{_words(t)}: the buffer has {plan.size} elements")
    if plan.num_chunks < 1:
        yield ExchangeFault("range", f"{plan.num_chunks} chunks; 1 is the least")
    # Owners have to tile 0:size in order, without a gap and without an overlap.
    end = 0
    for start, stop, holder in plan.owners:
        if start != end or stop <= start or not 0 <= holder < plan.num_holders:
            yield ExchangeFault("owners", f"holder {holder} owns {start}:{stop} after 0:{end}")
        end = stop
    if end != plan.size:
        yield ExchangeFault("owners", f"owners have 0:{end} of {plan.size} elements")


def _sets(plan: ExchangePlan) -> Iterator[ExchangeFault]:
    """Run the plan on sets, as bits of 64-bit words."""
    # Cut the buffer wherever any transfer or owner does.
    edges = [0, plan.size, *(o.start for o in plan.owners)]
    cuts = np.unique(np.concatenate([np.array(edges), plan.table[:, 3:5].ravel()]))
    owner_of = np.repeat(
        [o.holder for o in plan.owners],
        np.diff(np.searchsorted(cuts, [*(o.start for o in plan.owners), plan.size])),
    )
    holders, pieces = np.arange(plan.num_holders), np.arange(len(cuts) - 1)
    # [holder, word]: the set of each holder alone.
    alone = np.zeros((plan.num_holders, -(-plan.num_holders // 64)), np.uint64)
    alone[holders, holders // 64] = np.uint64(1) << (holders % 64).astype(np.uint64)
    all_holders = np.bitwise_or.reduce(alone, axis=0)
    # [holder, piece, word]: at first every holder has its own contribution.
    have = np.repeat(alone[:, None], len(pieces), axis=1)
    if plan.purpose == "all_gather":
        # An owner has what is to be known; the others have nothing.
        have[:] = 0
        have[owner_of, pieces] = all_holders
    # Transfers of a round read before any of them writes.
    is_first = np.diff(plan.table[:, 0], prepend=-1) != 0
    for table in np.split(plan.table, np.flatnonzero(is_first)[1:]):
        yield from _clashes(table)
        yield from _run(table, cuts, have)
    # At the end: everybody's contributions, for all who want them.
    wanted = (owner_of == holders[:, None]) | (plan.purpose != "reduce_scatter")
    missing = wanted & (have != all_holders).any(axis=2)
    for piece, holder in np.argwhere(missing.T).tolist():
        yield ExchangeFault(
            "missing",
            f"holder {holder} ends without all of elements {cuts[piece]}:{cuts[piece + 1]}",
        )


def _run(table: Ints, cuts: Ints, have: Sets) -> Iterator[ExchangeFault]:
    """Run a round: a sum must be of disjoint sets, a copy must add without losing.

    Args:
        table: as a plan's, of one round.
        cuts: [piece + 1], elements.
        have: [holder, piece, word], which the round changes.
    """
    first, last = (np.searchsorted(cuts, table[:, i]) for i in (3, 4))
    row, piece = pieces_of(first, last)
    source, there = table[row, 1], table[row, 2]
    reduces, values = table[row, 5] != 0, have[source, piece]
    found: list[tuple[int, FaultKind, str]] = []
    # Arrivals at one place come one after the other, so that each sees what those before it left.
    for turn in _turns(there * (len(cuts) - 1) + piece):
        place = there[turn], piece[turn]
        own, value, adds = have[place], values[turn], reduces[turn]
        lost, brought = (own & ~value).any(axis=1), (value & ~own).any(axis=1)
        is_twice = adds & (own & value).any(axis=1)
        found += [(i, "twice", "parts of it are added twice") for i in turn[is_twice].tolist()]
        is_idle, is_less = ~adds & ~brought, ~adds & lost
        found += [(i, "twice", "what it brings is there") for i in turn[is_idle].tolist()]
        found += [(i, "missing", "it puts less in its place") for i in turn[is_less].tolist()]
        have[place] = np.where(adds[:, None], own | value, value)
    for i, kind, text in sorted(found):
        yield ExchangeFault(kind, f"{_words(_transfer(table[row[i]]))}: {text}")


def _turns(places: Ints) -> Iterator[Ints]:
    """Yield the indices of the first arrivals at all places, of the second ones, and so on."""
    order = np.argsort(places, kind="stable")
    is_first = np.diff(places[order], prepend=-1) != 0
    starts = np.flatnonzero(is_first)
    turn = np.arange(len(order)) - np.repeat(starts, np.diff(starts, append=len(order)))
    by_turn = order[np.argsort(turn, kind="stable")]
    yield from np.split(by_turn, np.cumsum(np.bincount(turn))[:-1])


def _clashes(table: Ints) -> Iterator[ExchangeFault]:
    """Find overlapping ranges that arrive at a holder in one round, unless the ranges are equal and
    all are added."""
    # Sorted by receiver and start: if any two ranges overlap, two neighbours do.
    table = table[np.lexsort(table[:, [1, 4, 3, 2]].T)]
    before, after = table[:-1], table[1:]
    overlap = (before[:, 2] == after[:, 2]) & (after[:, 3] < before[:, 4])
    is_one = (before[:, 3:5] == after[:, 3:5]).all(axis=1) & (before[:, 5] & after[:, 5] != 0)
    is_again = before[:, 1] == after[:, 1]
    for i in np.flatnonzero(overlap & (~is_one | is_again)).tolist():
        t = _transfer(after[i])
        if is_one[i]:
            yield ExchangeFault("twice", f"{_words(t)}: it is sent twice")
        else:
            other = _words(_transfer(before[i]))
            yield ExchangeFault("clash", f"{_words(t)} overlaps with {other}")


def _transfer(row: Ints) -> Transfer:
    return Transfer._make((*row[:5].tolist(), bool(row[5])))


def _words(t: Transfer) -> str:
    verb = "reduces" if t.reduces else "copies"
    return f"round {t.round} {verb} {t.start}:{t.stop} from {t.source} to {t.destination}"
