"""An exchange plan run on one rank: rounds of batched messages, and sums in one fixed order.

All messages of a round are one batch of sends and receives: a holder waits for those with whom it
has something to exchange, and for no others (an all-to-all with sizes of 0 waits for all).  It adds
what it receives and its own in the order of the holders, in fp32; others receive the sum, in its
place where it is one range.  So all holders end with the same bits, in every run.  Two rounds in
which a holder only sums with one other are one all-reduce of the two (`exchange.groups.pairs`).

A round waits for the one before it.  Rounds go on while backward passes compute: on a CPU in
threads, as many as exchanges are under way at a time, which take them in the order in which they
start, one order on all ranks (so the first that is not done is under way on all of its holders); on
GPUs one after the other on a stream of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from torch.distributed import P2POp, ProcessGroup, batch_isend_irecv, irecv, isend

from megatron_hetero.exchange.check import require_exact
from megatron_hetero.exchange.groups.pairs import pair_sums
from megatron_hetero.exchange.plan import ExchangePlan, Transfer
from megatron_hetero.exchange.programmes import HolderRound, programmes
from megatron_hetero.runtime.faults.unfinished import wait_for
from megatron_hetero.runtime.gradients.groups.pair_group import PairGroup, Turn

Range = tuple[int, int]
"""First element, and the one behind the last."""


@dataclass
class _Round:
    """Messages of a holder in a round, at most a single message to each peer.

    Attributes:
        sent: [holder] -> ranges that go there.
        placed: [holder] -> the range that comes from there and is put into its place.
        received: [holder] -> elements that come from there into a buffer beside the exchanged one.
        added: range -> (holder, place in what is received) of every piece to add.
        copied: (start, stop, place in what is received).
    """

    sent: dict[int, list[Range]] = field(default_factory=dict)
    placed: dict[int, Range] = field(default_factory=dict)
    received: dict[int, int] = field(default_factory=dict)
    added: dict[Range, list[tuple[int, int]]] = field(default_factory=dict)
    copied: list[tuple[int, int, int]] = field(default_factory=list)


class HolderRounds:
    """The rounds of a single holder in an exchange.

    Args:
        plan: proved here before it is used.
        holder: this rank's place among the holders.
        pair: of this rank and the one with which `pair_sums` says that it sums, where both are to
            call a library for it; None leaves that to rounds on both.

    Raises:
        PlanFormatError: the plan has a fault.
    """

    def __init__(self, plan: ExchangePlan, holder: int, pair: PairGroup | None = None) -> None:
        require_exact(plan)
        self.plan, self.pair, self._holder = plan, pair, holder
        expanded = plan.expanded()
        programme = programmes(expanded)[holder]
        # The pair's sum stands for two rounds, `first` and the next; the others come around it.
        self._sum = None if pair is None else pair_sums(expanded)[holder]
        first = inf if self._sum is None else self._sum.round
        self._before = [_compiled(own) for own in programme if own.number < first]
        self._after = [_compiled(own) for own in programme if own.number > first + 1]

    def run(
        self, flat: torch.Tensor, group: ProcessGroup, tag: int, turn: Turn | None = None
    ) -> None:
        """Exchange a buffer with all holders, in place.

        Args:
            flat: shape [elements], contiguous.
            group: the holders, in the plan's order.
            tag: of the messages, the same on all holders; tells exchanges apart that are under way
                at a time.
            turn: of `pair`, taken when the exchange started; None takes the next.
        """
        # No library call: all rounds are messages.
        if self.pair is None or self._sum is None:
            self._run(self._before, flat, group, tag)
            return
        turn = turn or self.pair.next_turn()
        # The turn ends whatever happens, or later sums of the pair would wait for ever.
        try:
            self._run(self._before, flat, group, tag)
            turn.sum(flat[self._sum.start : self._sum.stop], self.pair.group)
        finally:
            turn.end()
        self._run(self._after, flat, group, tag)

    def _run(self, rounds: list[_Round], flat: torch.Tensor, group: ProcessGroup, tag: int) -> None:
        for own in rounds:
            # What is added or copied arrives beside the buffer, everything else in its place.
            sizes = list(own.received.values())
            received = flat.new_empty(sum(sizes))
            parts = dict(zip(own.received, received.split(sizes), strict=True))
            parts |= {holder: flat[start:stop] for holder, (start, stop) in own.placed.items()}
            # Several ranges for one peer are packed; a single range leaves from the buffer itself.
            sent = {
                holder: torch.cat([flat[a:b] for a, b in ranges])
                if len(ranges) > 1
                else flat[slice(*ranges[0])]
                for holder, ranges in own.sent.items()
            }
            operations = [
                P2POp(action, part, group=group, tag=tag, group_peer=holder)
                for action, of in ((irecv, parts), (isend, sent))
                for holder, part in sorted(of.items())
            ]
            wait_for(batch_isend_irecv(operations), operations)
            # The order of the holders gives all of them the same bits.
            for (start, stop), pieces in own.added.items():
                by_holder = {h: received[place : place + stop - start] for h, place in pieces}
                by_holder[self._holder] = flat[start:stop]
                add_in_order([by_holder[h] for h in sorted(by_holder)], flat[start:stop])
            for start, stop, place in own.copied:
                flat[start:stop] = received[place : place + stop - start]


def _compiled(own: HolderRound) -> _Round:
    """Join the transfers of a round into messages."""
    made = _Round()
    # Both ends order a message by first elements, so that it needs no header.
    for t in sorted(own.sends, key=lambda t: (t.destination, t.start)):
        _append(made.sent.setdefault(t.destination, []), (t.start, t.stop))
    messages: dict[int, list[Transfer]] = {}
    for t in sorted(own.receives, key=lambda t: (t.source, t.start)):
        messages.setdefault(t.source, []).append(t)
    # A range arrives in its place only if no part of it leaves in the same round.
    leaving = [part for parts in made.sent.values() for part in parts]
    place = 0
    for source, transfers in messages.items():
        ranges: list[Range] = []
        for t in transfers:
            _append(ranges, (t.start, t.stop))
        (start, stop), *others = ranges
        is_free = all(stop <= low or high <= start for low, high in leaving)
        if is_free and not others and not any(t.reduces for t in transfers):
            made.placed[source] = start, stop
            continue
        # All else arrives beside the buffer, from `place` on.
        made.received[source] = sum(t.stop - t.start for t in transfers)
        for t in transfers:
            if t.reduces:
                made.added.setdefault((t.start, t.stop), []).append((source, place))
            else:
                made.copied.append((t.start, t.stop, place))
            place += t.stop - t.start
    return made


def _append(ranges: list[Range], new: Range) -> None:
    """Append a range; join it to the last range if adjacent."""
    if ranges and ranges[-1][1] == new[0]:
        new = ranges.pop()[0], new[1]
    ranges.append(new)


def add_in_order(pieces: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """Write the sum of two pieces or more, the first ones first, in fp32 at least.

    Args:
        pieces: [piece], shape [elements]; they are overwritten.
        total: the same shape; may be one of the pieces.
    """
    first, *others, last = pieces
    # Pieces in half precision are summed in fp32, and rounded once at the end.
    so_far = first.to(torch.promote_types(first.dtype, torch.float32))
    for piece in others:
        so_far.add_(piece)
    torch.add(so_far, last, out=total)


class RoundsWork:
    """An exchange under way, as the works of `torch.distributed` are."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action = action
        self._is_done = Event()
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do all rounds; an error is kept for `wait`."""
        try:
            self._action()
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        finally:
            self._is_done.set()

    def is_completed(self) -> bool:
        """Tell if all rounds are done."""
        return self._is_done.is_set()

    def wait(self) -> bool:
        """Wait for the last round.

        Raises:
            Exception: what a round raised.
        """
        self._is_done.wait()
        if self._error is not None:
            raise self._error
        return True


class _StreamWork:
    """An exchange on a stream of its own."""

    def __init__(self, stream: Any, action: Callable[[], None]) -> None:
        self._stream = stream
        # The exchange reads what the current stream still computes.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            action()
            self._event = torch.cuda.Event()
            self._event.record(stream)

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> bool:
        torch.cuda.current_stream().wait_stream(self._stream)
        return True


class RoundsEngine:
    """Thread or stream for a rank's exchanges beside the computations."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[RoundsWork] = SimpleQueue()
        self._threads: list[Thread] = []
        self._under_way: list[RoundsWork] = []
        self._stream: Any = None
        self._num_started: dict[int, int] = {}

    def start(
        self, rounds: HolderRounds, flat: torch.Tensor, group: ProcessGroup
    ) -> RoundsWork | _StreamWork:
        """Start an exchange; `flat` may not be touched until the work is done.

        All holders start the exchanges of a group in one order.
        """
        # Of a pair of holders those of a group have one order, and so one number on both.
        number = self._num_started.get(id(group), 0)
        self._num_started[id(group)] = number + 1
        tag = number % _TAGS
        turn = None if rounds.pair is None else rounds.pair.next_turn()
        action = partial(rounds.run, flat, group, tag, turn)
        if flat.is_cuda:
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            return _StreamWork(self._stream, action)
        work = RoundsWork(action)
        self._queue.put(work)
        # One thread for each exchange under way: an exchange that waits must not hold up the next.
        self._under_way = [other for other in self._under_way if not other.is_completed()] + [work]
        while len(self._threads) < len(self._under_way):
            name = f"gradient-rounds-{len(self._threads)}"
            self._threads.append(Thread(target=self._run, name=name, daemon=True))
            self._threads[-1].start()
        return work

    def _run(self) -> None:
        while True:
            self._queue.get().run()


_TAGS = 1 << 12
"""More than there are exchanges of a group under way."""
