"""NCCL's rules, applied to the operations of all ranks: do they end, whatever the timing?

1. A communicator is made at its first operation, and the host of each of its ranks waits there for
   the others (torch, lazy start).
2. Two ranks connect at their first message in a communicator, and both hosts wait there
   (`ncclGroupEnd`).
3. Operations of a communicator run in the order in which they are given, on its stream.  torch has
   32 streams of each priority and hands them out in turn, so that two communicators may share one.
4. The streams of a GPU share its hardware queues (`CUDA_DEVICE_MAX_CONNECTIONS`; Megatron asks for
   one).  What waits at the head of a queue holds up all that was given to the queue later.
5. An operation begins when what was computed before it was given is done; it ends when all of its
   ranks run it.  Nothing is buffered, which is the strictest that a library may be.

To go on never hinders anybody, so the state in which nobody can go on does not depend on the order
in which ranks go on: one run proves all timings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_hetero.plan.communication.communicators import URGENT_USES
from megatron_hetero.schedule.proof.operations import Item, JobOperations

NUM_STREAMS = 32
"""Number of streams of each priority; torch hands the streams out in turn
(`c10/cuda/CUDAStream.cpp`, kStreamsPerPool)."""
_COMPUTE = 0
"""The stream of what is computed."""


@dataclass(frozen=True)
class Blocked:
    """A rank that cannot go on, and the reason.

    Attributes:
        rank: the rank.
        item: where it stands.
        reason: "communicator" or "connection" (its host makes one), "operation" (it needs the end
            of `behind`), or "computation" (its host needs what is given to the GPU done).
        behind: the operation, of this rank, whose end it needs.
        missing: ranks that have not come.
    """

    rank: int
    item: Item
    reason: str
    behind: Item | None
    missing: tuple[int, ...]


def blocked_ranks(job: JobOperations, num_connections: int = 1) -> tuple[Blocked, ...]:
    """Run all operations as far as they go; return the ranks that do not come to their end.

    Args:
        job: its operations.
        num_connections: hardware queues of a GPU.
    """
    machines = _Machines(job, num_connections)
    machines.run()
    return machines.blocked()


class _Machines:
    """Hosts, queues and communicators of a job as they work off their operations."""

    def __init__(self, job: JobOperations, num_connections: int) -> None:
        self.job = job
        size = len(job.ranks)
        self.members = [len(group.ranks) for group in job.groups]
        self.streams = _streams(job)
        self.num_connections = num_connections
        # Hosts: the next item; devices: by queue its items, and the next of them.
        self.host = [0] * size
        self.queues: list[dict[int, list[int]]] = [defaultdict(list) for _ in range(size)]
        self.heads: list[dict[int, int]] = [defaultdict(int) for _ in range(size)]
        self.last_wait = [-1] * size
        self.waits_before: list[dict[int, int]] = [{} for _ in range(size)]
        self.computed = [-1] * size
        # Operations: of each rank those that are done, and the messages that still miss a partner.
        self.is_done: list[list[bool]] = [[] for _ in range(size)]
        self.missing: list[dict[int, int]] = [{} for _ in range(size)]
        self.on_stream: list[dict[int, int]] = [{} for _ in range(size)]
        self.counts: list[dict[tuple[int, int, bool], int]] = [
            defaultdict(int) for _ in range(size)
        ]
        self.begun: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        # Who came to make a communicator or a connection.
        self.came: dict[tuple[int, ...], set[int]] = defaultdict(set)
        self.ready = list(range(size))
        self.is_ready = [True] * size
        self.item_of: list[dict[int, Item]] = [{} for _ in range(size)]
        for rank, items in enumerate(job.ranks):
            self.is_done[rank] = [False] * (1 + max((i.operation for i in items), default=-1))

    def run(self) -> None:
        while self.ready:
            rank = self.ready.pop()
            self.is_ready[rank] = False
            while self._host(rank) or self._device(rank):
                pass

    def _wake(self, rank: int) -> None:
        if not self.is_ready[rank]:
            self.is_ready[rank] = True
            self.ready.append(rank)

    def _host(self, rank: int) -> bool:
        """Let a host go on as far as it can; tell if it moved."""
        # A host gives operations ahead of the GPU until it has to wait itself.
        items, first = self.job.ranks[rank], self.host[rank]
        place = first
        while place < len(items):
            item = items[place]
            if item.kind == "wait":
                self._give(rank, place, _COMPUTE)
                self.last_wait[rank] = place
            elif item.kind == "sync":
                if self.last_wait[rank] > self.computed[rank]:
                    break
            else:
                if not self._is_made(rank, item):
                    break
                # An operation begins after what was computed before it, so after the last wait.
                self.waits_before[rank][place] = self.last_wait[rank]
                self.item_of[rank][item.operation] = item
                self._give(rank, place, self.streams[rank][item.group])
            place += 1
        self.host[rank] = place
        return place > first

    def _give(self, rank: int, place: int, stream: int) -> None:
        self.queues[rank][stream % self.num_connections].append(place)

    def _is_made(self, rank: int, item: Item) -> bool:
        """Come to make what an operation needs; tell if all have come."""
        # First all ranks of the communicator, then both ends of each message.
        is_made = self._meet(rank, (item.group,), self.members[item.group])
        for peer, is_sent in item.messages if is_made else ():
            ends = (rank, peer) if is_sent else (peer, rank)
            is_made &= self._meet(rank, (item.group, *ends), 2)
        return is_made

    def _meet(self, rank: int, key: tuple[int, ...], wanted: int) -> bool:
        # The last to come wakes the others.
        came = self.came[key]
        if rank not in came:
            came.add(rank)
            if len(came) == wanted:
                for other in came:
                    if other != rank:
                        self._wake(other)
        return len(came) == wanted

    def _device(self, rank: int) -> bool:
        """Let a GPU go on as far as it can; tell if it moved."""
        items, has_moved = self.job.ranks[rank], False
        heads = self.heads[rank]
        # A queue that moves may let another one go on, so all are tried again.
        moves = True
        while moves:
            moves = False
            for queue, places in self.queues[rank].items():
                while heads[queue] < len(places):
                    place = places[heads[queue]]
                    if not self._begin(rank, place, items[place]):
                        break
                    heads[queue] += 1
                    moves = has_moved = True
        return has_moved

    def _begin(self, rank: int, place: int, item: Item) -> bool:
        # A wait is over when its operation is done.
        if item.kind == "wait":
            if not self.is_done[rank][item.operation]:
                return False
            self.computed[rank] = place
            return True
        # The operation waits for what was computed before it, then for the one before it on its
        # stream.
        if self.waits_before[rank][place] > self.computed[rank]:
            return False
        stream = self.streams[rank][item.group]
        last = self.on_stream[rank].get(stream)
        if last is not None and not self.is_done[rank][last]:
            return False
        self.on_stream[rank][stream] = item.operation
        if item.kind == "collective":
            self._come(rank, item, (item.group, self._number(rank, item.group, -1, True)), None)
        else:
            # Messages of one operation end it together.
            self.missing[rank][item.operation] = len(item.messages)
            for peer, is_sent in item.messages:
                ends = (rank, peer) if is_sent else (peer, rank)
                number = self._number(rank, item.group, peer, is_sent)
                self._come(rank, item, (item.group, *ends, number), 2)
            if not item.messages:
                self.is_done[rank][item.operation] = True
        return True

    def _number(self, rank: int, group: int, peer: int, is_sent: bool) -> int:
        """Count the operations of a rank to one peer; NCCL tells them apart by their order alone.
        """
        key = group, peer, is_sent
        self.counts[rank][key] += 1
        return self.counts[rank][key]

    def _come(self, rank: int, item: Item, key: tuple[int, ...], wanted: int | None) -> None:
        """Begin a rank's part of a collective or a message; the last one ends it for all."""
        begun = self.begun.setdefault(key, [])
        begun.append((rank, item.operation))
        if len(begun) < (wanted or self.members[item.group]):
            return
        # The last one to begin ends its part for all; a rank may wait for more messages.
        for other, operation in begun:
            if wanted is None:
                self.is_done[other][operation] = True
            else:
                self.missing[other][operation] -= 1
                if self.missing[other][operation]:
                    continue
                self.is_done[other][operation] = True
            if other != rank:
                self._wake(other)
        del self.begun[key]

    def blocked(self) -> tuple[Blocked, ...]:
        """Return the unfinished ranks, and why."""
        found = []
        for rank, items in enumerate(self.job.ranks):
            if stuck := self._device_reason(rank):
                found.append(stuck)
            elif self.host[rank] < len(items):
                found.append(self._host_reason(rank, items[self.host[rank]]))
        return tuple(found)

    def _host_reason(self, rank: int, item: Item) -> Blocked:
        # A host waits for its GPU, for members of a communicator, or for the other end of a
        # connection.
        if item.kind == "sync":
            return Blocked(rank, item, "computation", None, ())
        missing = set(self.job.groups[item.group].ranks) - self.came[item.group,]
        if missing:
            return Blocked(rank, item, "communicator", None, tuple(sorted(missing)))
        absent = [
            peer
            for peer, is_sent in item.messages
            if len(self.came[(item.group, *((rank, peer) if is_sent else (peer, rank)))]) < 2
        ]
        return Blocked(rank, item, "connection", None, tuple(absent))

    def _device_reason(self, rank: int) -> Blocked | None:
        for queue, places in self.queues[rank].items():
            # The first unfinished item in a queue whose operation others have not begun tells the
            # reason.
            for place in places[self.heads[rank][queue] :]:
                item = self.job.ranks[rank][place]
                operation = item.operation
                if item.kind != "wait":
                    last = self.on_stream[rank].get(self.streams[rank][item.group])
                    if last is None or self.is_done[rank][last]:
                        continue
                    operation = last
                if operation in self.item_of[rank] and not self.is_done[rank][operation]:
                    behind = self.item_of[rank][operation]
                    missing = self._not_begun(rank, behind)
                    if missing:
                        return Blocked(rank, item, "operation", behind, missing)
        return None

    def _not_begun(self, rank: int, item: Item) -> tuple[int, ...]:
        """Return the ranks missing from the operation that an item runs."""
        found: set[int] = set()
        # A collective's key is (group, number), a message's has both ends too.
        for key, begun in self.begun.items():
            if (rank, item.operation) not in begun:
                continue
            ranks = self.job.groups[item.group].ranks if len(key) == 2 else key[1:3]
            found |= set(ranks) - {other for other, _ in begun}
        return tuple(sorted(found))


def _streams(job: JobOperations) -> Sequence[Mapping[int, int]]:
    """Map each rank's communicators to streams, as torch hands the streams out."""
    found: list[dict[int, int]] = [{} for _ in job.ranks]
    counts = [[0, 0] for _ in job.ranks]
    for number, group in enumerate(job.groups):
        is_urgent = group.use in URGENT_USES
        for rank in group.ranks:
            # Streams in turn for each priority; 0 is the stream of what is computed.
            place = counts[rank][is_urgent] % NUM_STREAMS
            counts[rank][is_urgent] += 1
            found[rank][number] = 1 + is_urgent * NUM_STREAMS + place
    return found
