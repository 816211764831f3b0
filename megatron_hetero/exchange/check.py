"""Proof of an exchange's purpose, with sets of holders in place of numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Transfer
from megatron_hetero.exchange.programmes import HolderRound, programmes, stuck

FaultKind = Literal["holder", "range", "owners", "twice", "clash", "missing", "deadlock", "buffers"]


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
    for t in plan.transfers():
        if not (0 <= t.source < plan.num_holders and 0 <= t.destination < plan.num_holders):
            yield ExchangeFault("holder", f"{_words(t)}: there are {plan.num_holders} holders")
        elif t.source == t.destination:
            yield ExchangeFault("holder", f"{_words(t)}: a holder sends nothing to itself")
        if not 0 <= t.start < t.stop <= plan.size:
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
    """Run the plan on sets, as bits of whole numbers."""
    # Cut the buffer wherever any transfer or owner does.
    edges = {0, plan.size, *(o.start for o in plan.owners)}
    edges |= {edge for t in plan.transfers() for edge in (t.start, t.stop)}
    cuts = sorted(edges)
    num = len(cuts) - 1
    all_holders = (1 << plan.num_holders) - 1
    owner_of = _owner_of(cuts, plan.owners)
    # At first every holder has its own contribution.
    have = [[1 << holder] * num for holder in range(plan.num_holders)]
    if plan.purpose == "all_gather":
        # An owner has what is to be known; the others have nothing.
        have = [[0] * num for _ in range(plan.num_holders)]
        for piece, owner in enumerate(owner_of):
            have[owner][piece] = all_holders
    # Transfers of a round read before any of them writes.
    for _, transfers in groupby(plan.transfers(), key=lambda t: t.round):
        arriving = []
        for t in transfers:
            pieces = range(bisect_left(cuts, t.start), bisect_left(cuts, t.stop))
            arriving.append((t, pieces, [have[t.source][piece] for piece in pieces]))
        yield from _clashes([t for t, _, _ in arriving])
        # A sum must be of disjoint sets, a copy must add without losing.
        for t, pieces, values in arriving:
            own = have[t.destination]
            for piece, value in zip(pieces, values, strict=True):
                if t.reduces and own[piece] & value:
                    yield ExchangeFault("twice", f"{_words(t)}: parts of it are added twice")
                if not t.reduces and value & ~own[piece] == 0:
                    yield ExchangeFault("twice", f"{_words(t)}: what it brings is there")
                if not t.reduces and own[piece] & ~value:
                    yield ExchangeFault("missing", f"{_words(t)}: it puts less in its place")
                own[piece] = own[piece] | value if t.reduces else value
    # At the end: everybody's contributions, for all who want them.
    for piece in range(num):
        for holder in range(plan.num_holders):
            wanted = plan.purpose != "reduce_scatter" or owner_of[piece] == holder
            if wanted and have[holder][piece] != all_holders:
                yield ExchangeFault(
                    "missing",
                    f"holder {holder} ends without all of elements {cuts[piece]}:{cuts[piece + 1]}",
                )


def _owner_of(cuts: Sequence[int], owners: Sequence[Owned]) -> list[int]:
    # Both lists rise, so that one walk finds the owner of every piece.
    found, at = [], 0
    for start in cuts[:-1]:
        while owners[at].stop <= start:
            at += 1
        found.append(owners[at].holder)
    return found


def _clashes(transfers: Sequence[Transfer]) -> Iterator[ExchangeFault]:
    """Find overlapping ranges that arrive at a holder in the same round, unless the ranges are
    equal and all are added."""
    for _, own in groupby(sorted(transfers, key=_arrival), key=lambda t: t.destination):
        # Sorted by receiver and start: if any two ranges overlap, two neighbours do.
        before: Transfer | None = None
        for t in own:
            if before is not None and t.start < before.stop:
                is_one = (t.start, t.stop) == (before.start, before.stop)
                if not (is_one and t.reduces and before.reduces):
                    yield ExchangeFault("clash", f"{_words(t)} overlaps with {_words(before)}")
                elif t.source == before.source:
                    yield ExchangeFault("twice", f"{_words(t)}: it is sent twice")
            before = t


def _arrival(t: Transfer) -> tuple[int, int, int, int]:
    return t.destination, t.start, t.stop, t.source


def _words(t: Transfer) -> str:
    verb = "reduces" if t.reduces else "copies"
    return f"round {t.round} {verb} {t.start}:{t.stop} from {t.source} to {t.destination}"
