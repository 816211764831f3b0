"""Shared memory of a rehearsal's ranks: occupied links, and the arrivals of ranks and messages.

It is made before the ranks are forked, in anonymous memory. All times are seconds of
`time.monotonic`, which is one clock for all processes of a machine.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from megatron_hetero.errors import CheckFailedError

Key = tuple[object, ...]
"""Name of a message or collective, equal on all ranks; the `repr` is compared."""
Hops = Sequence[tuple[Sequence[int], float]]
"""The paths that a message or a collective takes at once, and for how many seconds, hop by hop."""

FIELDS = ("latest_s", "num_come", "asked_s", "arrival_s")
"""latest_s: when the last rank came, of `num_come`; asked_s: when a receiver asked; arrival_s: when
it is done on the described links."""
LOOK_AGAIN_S = 1e-3
TAKEN_KEPT = 64
"""Most messages on a path that may be taken out of turn before a gap is forgotten."""
MOST_DUE = 256
"""Most messages that may be due on a path before the first takes the path."""


class Board:
    """A table in memory that all ranks share; `paths` are numbered from 0."""

    def __init__(self, num_paths: int, num_slots: int) -> None:
        self._lock = multiprocessing.Lock()
        # The latest times for which each path is taken, as (begin, end, there since), round and
        # round.
        self._taken_s = multiprocessing.RawArray("d", num_paths * 3 * TAKEN_KEPT)
        self._num_taken = multiprocessing.RawArray("Q", num_paths)
        # [path][place] of what is due on each path: since when, and its name (0: nothing).
        shape = max(num_paths, 1), MOST_DUE
        since = multiprocessing.RawArray("d", shape[0] * MOST_DUE)
        names = multiprocessing.RawArray("Q", shape[0] * MOST_DUE)
        self._due_s = np.frombuffer(since, np.float64).reshape(shape)
        self._due_names = np.frombuffer(names, np.uint64).reshape(shape)
        self._num_slots = num_slots
        self._keys = multiprocessing.RawArray("Q", num_slots)
        self._values = multiprocessing.RawArray("d", num_slots * len(FIELDS))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the table; no other rank reads or writes inside the block."""
        with self._lock:
            yield

    def get(self, key: Key, field: str) -> float:
        """Read one field; 0.0 if it was not written."""
        return float(self._values[self._slot(key) + FIELDS.index(field)])

    def put(self, key: Key, field: str, value: float) -> None:
        """Write one field."""
        self._values[self._slot(key) + FIELDS.index(field)] = value

    def come(self, key: Key, at_s: float, num_ranks: int = 0, hops: Hops = ()) -> float:
        """Count another rank's arrival at a message or collective.

        The last of `num_ranks` announces `hops` before any rank can take them.

        Args:
            key: name of the message or collective.
            at_s: the rank's time.
            num_ranks: number of ranks that have to arrive; 0 if nothing is announced.
            hops: paths to announce.
        Returns:
            The result of `announce`, or 0.0.
        """
        with self.locked():
            num_come = round(self.get(key, "num_come")) + 1
            self.put(key, "latest_s", max(self.get(key, "latest_s"), at_s))
            self.put(key, "num_come", num_come)
            overtaken_s = 0.0
            # The last rank knows when the collective can begin, so that it announces the hops.
            if num_come == num_ranks:
                overtaken_s = self.announce(key, hops, self.get(key, "latest_s"))
        return overtaken_s

    def wait_for(self, key: Key, num_ranks: int) -> None:
        """Wait until `num_ranks` ranks have arrived."""
        while True:
            with self.locked():
                if self.get(key, "num_come") >= num_ranks:
                    return
            time.sleep(LOOK_AGAIN_S)

    def latest_s(self, key: Key) -> float:
        """Return the time at which the last rank so far arrived."""
        with self.locked():
            return self.get(key, "latest_s")

    def announce(self, key: Key, hops: Hops, from_s: float) -> float:
        """Register a message that will take these paths, and is ready from `from_s` on.

        Returns:
            Seconds by which messages delay each other out of turn: where a path is already taken by
            one that was ready later, because this machine was late.
        """
        overtaken_s = 0.0
        for path, seconds in _seconds(hops).items():
            overtaken_s = max(overtaken_s, self._overtaken_s(path, from_s, seconds))
            # A free place on the path: name 0.
            free = np.flatnonzero(self._due_names[path] == 0)
            if not free.size:
                raise CheckFailedError(f"more than {MOST_DUE} messages are due on one link")
            self._due_s[path, free[0]], self._due_names[path, free[0]] = from_s, _name(key)
        return overtaken_s

    def is_its_turn(self, key: Key, hops: Hops, from_s: float) -> bool:
        """Tell if all earlier messages on these paths have taken the paths.

        If two were ready at once, the one with the lower name is first.
        """
        paths = _paths(hops)
        names, due_s = self._due_names[paths], self._due_s[paths]
        # Announced earlier in the ranks' time, whatever this machine did first.
        is_before = (due_s < from_s) | ((due_s == from_s) & (names < _name(key)))
        return not (is_before & (names != 0)).any()

    def take(self, key: Key, hops: Hops, from_s: float) -> float:
        """Take the paths of every hop for its seconds, each in the first common gap.

        This holds a link to its bandwidth, whoever sends. Announced messages take their paths in
        the order of the ranks' own times; a message that comes after its turn, because this machine
        was late, takes the first gap.

        Returns:
            The time at which the last hop is done.
        """
        name = _name(key)
        # The message is due no longer on any of its paths.
        for path in _paths(hops):
            self._due_names[path, self._due_names[path] == name] = 0
        last_s = from_s
        # All paths of a hop are taken at once; hops do not wait for each other.
        for paths, seconds in hops:
            start_s = self._first_gap(paths, from_s, seconds)
            for path in paths:
                self._take_path(path, start_s, start_s + seconds, from_s)
            last_s = max(last_s, start_s + seconds)
        return last_s

    def _overtaken_s(self, path: int, from_s: float, seconds: float) -> float:
        until_s = from_s + seconds
        # Time taken within this message's own by messages that were ready later.
        before_s = sum(
            end_s - max(begin_s, from_s)
            for begin_s, end_s, since_s in self._taken(path)
            if since_s > from_s and end_s > from_s and begin_s < until_s
        )
        return before_s + seconds if before_s else 0.0

    def _first_gap(self, paths: Sequence[int], from_s: float, seconds: float) -> float:
        taken = sorted(interval for path in paths for interval in self._taken(path))
        start_s = from_s
        # Gaps in order of time: a conflict moves the start behind what is there.
        for begin_s, end_s, _ in taken:
            if begin_s < start_s + seconds and end_s > start_s:
                start_s = end_s
        return start_s

    def _taken(self, path: int) -> Iterator[tuple[float, float, float]]:
        # [path][place][begin, end, since], flat; the oldest place is overwritten.
        base = path * 3 * TAKEN_KEPT
        for place in range(base, base + 3 * min(self._num_taken[path], TAKEN_KEPT), 3):
            begin_s, end_s, since_s = self._taken_s[place : place + 3]
            yield begin_s, end_s, since_s

    def _take_path(self, path: int, begin_s: float, end_s: float, since_s: float) -> None:
        place = 3 * (path * TAKEN_KEPT + self._num_taken[path] % TAKEN_KEPT)
        self._taken_s[place : place + 3] = [begin_s, end_s, since_s]
        self._num_taken[path] += 1

    def _slot(self, key: Key) -> int:
        name = _name(key)
        # Open addressing: the next slot that is free or has this name.
        for step in range(self._num_slots):
            slot = (name + step) % self._num_slots
            if self._keys[slot] in (0, name):
                self._keys[slot] = name
                return slot * len(FIELDS)
        raise CheckFailedError(f"the rehearsal has more than {self._num_slots} messages")


def _name(key: Key) -> int:
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest()) or 1


def _paths(hops: Hops) -> list[int]:
    return sorted(_seconds(hops))


def _seconds(hops: Hops) -> dict[int, float]:
    """Sum the seconds for which each path is taken."""
    found: dict[int, float] = {}
    for paths, seconds in hops:
        for path in paths:
            found[path] = found.get(path, 0.0) + seconds
    return found
