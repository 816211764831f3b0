"""Messages and collectives of one rank, held to the described links.

A message leaves its sender when the described links would have delivered it: a courier thread keeps
it until then, so that its receiver waits in the real transport. A collective ends for all its ranks
when the described ring would end.

Sender and receiver also note on the board, in the rank's time, when a message was due and when it
was asked for, so that the lag of this machine's own threads and sockets does not add up over the
hops of a step (see `clock`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch.distributed as dist

from megatron_hetero.lab.rehearse.clock import Clock, now, sleep_until
from megatron_hetero.lab.rehearse.links.board import LOOK_AGAIN_S, Board, Hops, Key
from megatron_hetero.lab.rehearse.links.network import CollectiveHops, Network
from megatron_hetero.lab.rehearse.links.works import CollectiveWork, Courier, SendWork


class SentSpan(NamedTuple):
    """A message of this rank; its times are seconds since the step began."""

    receiver: int
    num_bytes: float
    posted_s: float
    arrival_s: float


class LinkHolder:
    """Messages and collectives of one rank, delivered when the described links would."""

    def __init__(self, rank: int, board: Board, network: Network, clock: Clock) -> None:
        self.rank = rank
        self.board, self.network, self.clock = board, network, clock
        self.sent: list[SentSpan] = []
        self.collectives: list[tuple[str, float, float]] = []
        """(kind, begin, end), seconds since the step began."""
        self.line_s: defaultdict[str, float] = defaultdict(float)
        """Seconds of the cluster for which this rank's traffic occupied each path and line."""
        self._counts: Counter[Key] = Counter()
        self._courier = Courier()

    def send(
        self, operation: Any, num_bytes: float, deliver: Callable[[list[Any]], list[Any]]
    ) -> SendWork:
        """Send a message: hand it over when the links have delivered it.

        Args:
            operation: a `torch.distributed.P2POp` of `isend`.
            num_bytes: bytes of the message in the real model.
            deliver: the real `batch_isend_irecv`.
        """
        # The message on the described links, in rehearsed time.
        key = self.number(("message", self.rank, operation.peer, name_of(operation.group)))
        hop = self.network.hop(self.rank, operation.peer)
        scale, begin_s = self.clock.scale, self.clock.step_begin_s
        posted_s = self.clock.time()
        hops = [(paths, seconds * scale) for paths, seconds in hop.taken(num_bytes)]
        work = SendWork(self, key)

        # When its turn comes it takes its paths; its arrival follows.
        def take() -> None:
            with self.board.locked():
                if not self.board.is_its_turn(key, hops, posted_s):
                    self._courier.call_at(now() + LOOK_AGAIN_S, take)
                    return
                arrival_s = self.board.take(key, hops, posted_s) + hop.latency_s * scale
                self.board.put(key, "arrival_s", arrival_s)
                self._count(hop.taken(num_bytes))
            self.sent.append(
                SentSpan(operation.peer, num_bytes, posted_s - begin_s, arrival_s - begin_s)
            )
            self._courier.call_at(arrival_s, lambda: work.left(deliver([operation])))

        # Announce it at once: later messages have to wait for it.
        with self.board.locked():
            self.clock.lost_s += self.board.announce(key, hops, posted_s)
        self._courier.call_at(self._turn_s(hops, posted_s), take)
        return work

    def _turn_s(self, hops: Hops, from_s: float) -> float:
        """Return the time at which a message ready at `from_s` takes the paths.

        It is early enough that the message cannot be over yet, and late enough that everything
        earlier in the ranks' time has been announced.
        """
        longest_s = max(seconds for _, seconds in hops)
        return from_s + min(self.clock.allowance_s, longest_s / 2)

    def hold(
        self,
        group: Any,
        ring: CollectiveHops | None,
        real: Callable[[bool], Any],
        async_op: bool,
        kind: str = "",
    ) -> Any:
        """Run a collective, and end it when `ring` would.

        Without a ring it ends when all ranks have arrived.

        Args:
            group: its process group.
            ring: its hops over the described links.
            real: runs the real collective, asynchronously if its argument is True.
            async_op: as in `torch.distributed`.
            kind: its `OpSpan` kind; "" leaves it out of the timeline.
        """
        # The last rank to come announces the hops; overtaking by this
        # machine's fault counts as lost.
        ranks = tuple(ranks_of(group))
        key = self.number(("collective", ranks, name_of(group)))
        self.clock.lost_s += self.board.come(key, self.clock.time(), len(ranks), self._hops(ring))
        if not async_op:
            real(False)
            self._until(self.done_s(key, ring, kind))
            return None
        # A thread waits, so that this rank computes on as with NCCL.
        work = CollectiveWork(self, key, ring, kind, real(True))
        work.start()
        return work

    def done_s(self, key: Key, ring: CollectiveHops | None, kind: str) -> float:
        """Wait for all ranks of a collective; return when the links complete it.

        The real collective may end earlier on some ranks, as a broadcast does on its root.
        """
        scale = self.clock.scale
        _, ranks, *_ = key
        self.board.wait_for(key, len(cast(tuple[int, ...], ranks)))
        begin_s = self.board.latest_s(key)
        # Not before everything earlier can have been announced.
        hops = self._hops(ring)
        if hops:
            sleep_until(self._turn_s(hops, begin_s))
        # Whichever rank finds the turn first takes the paths for all of them.
        while True:
            with self.board.locked():
                done_s = self.board.get(key, "arrival_s")
                if not done_s and self.board.is_its_turn(key, hops, begin_s):
                    latency_s = ring.latency_s * scale if ring else 0.0
                    done_s = self.board.take(key, hops, begin_s) + latency_s
                    self.board.put(key, "arrival_s", done_s)
                    self._count(ring.hops if ring else ())
            if done_s:
                break
            time.sleep(LOOK_AGAIN_S)
        if ring is not None and kind:
            step_s = self.clock.step_begin_s
            self.collectives.append((kind, begin_s - step_s, done_s - step_s))
        return done_s

    def _count(self, hops: Hops) -> None:
        for paths, seconds in hops:
            for path in paths:
                self.line_s[self.network.path_names[path]] += seconds

    def _hops(self, ring: CollectiveHops | None) -> Hops:
        """Convert the hops of a ring to this machine's seconds."""
        scale = self.clock.scale
        return [(paths, seconds * scale) for paths, seconds in ring.hops] if ring else []

    def _until(self, at_s: float) -> None:
        sleep_until(at_s)
        self.clock.reach(at_s)

    def waited(self, due_s: float, asked_s: float) -> None:
        """Move the clock on: a message, due at `due_s`, was asked for at `asked_s`."""
        self.clock.reach(self.clock.at(max(due_s, asked_s)))

    def number(self, key: Key) -> Key:
        """Append to a key the count of the key so far, equal on all ranks."""
        self._counts[key] += 1
        return (*key, self._counts[key])


def ranks_of(group: Any) -> list[int]:
    """Return the global ranks of a process group; None is the world."""
    return dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


def name_of(group: Any) -> str:
    """Return the name of a process group, equal on all its ranks; None is the world."""
    return str((group if group is not None else dist.group.WORLD).group_name)
