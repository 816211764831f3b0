"""Meeting of a job's ranks before any process group exists: all start alike, or none starts.

Each rank publishes what must be equal on all (`agreement`).  The last one to come compares, and one
verdict is everybody's.  A rank that refuses to start, whatever the reason, gives the verdict
itself.  No clock is compared with another machine's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_hetero.errors import (
    EXIT_RANK_DIED,
    EnvironmentMismatchError,
    HeteroError,
    UsageError,
    some_of,
)
from megatron_hetero.files import content_hash
from megatron_hetero.runtime.faults.place import Place
from megatron_hetero.runtime.faults.store import launcher_serves, side_store
from megatron_hetero.runtime.job.agreement import disagreement
from megatron_hetero.runtime.job.world import World

_VERDICT, _ARRIVED, _SEEN, _ALL_SEEN = "verdict", "arrived", "seen", "all-seen"
_LOOK_S = 1.0
"""Between two looks at the processes of this machine."""
_ASK_S = 0.05
"""Between two questions to the store."""
_TOLD_S = 60.0
"""Limit on the wait of a refusing rank for late ranks."""
_LEAVE_S = 5.0
"""Limit on the wait of a told rank for all ranks to be told."""
# Seconds between two lines about missing ranks.
_NEWS_S = 30.0


class RankRefusedError(HeteroError):
    """Refusal of the job by another rank; the exit code is that rank's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class StartMeeting:
    """The meeting from the side of a single rank."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None
        self._rank, self._num_ranks = 0, 1
        self._items: dict[str, str] = {}
        self._is_over = self._serves = False

    def announce(self, world: World) -> None:
        """Say that this rank's process is there; nothing for a job of one, or without a place to
        meet.

        Raises:
            EnvironmentMismatchError: the others cannot be reached.
        """
        if world.size == 1 or self._store is not None or self._is_over:
            return
        self._rank, self._num_ranks = world.rank, world.size
        store = side_store("meeting", world.store_path, world.rank, world.size)
        # Rank 0 serves the store, unless a file or the launcher does.
        self._serves = world.rank == 0 and world.store_path is None and not launcher_serves()
        if store is not None:
            store.set(f"place/{self._rank}", Place.here(self._rank, "on its way").text())
            self._store = store

    def bring(self, items: Mapping[str, str]) -> None:
        """Note what must be equal on all ranks."""
        self._items = dict(items)

    def agree(self, timeout: timedelta) -> None:
        """Return when all ranks have met and agree on the items brought. Collective.

        Args:
            timeout: limit on the wait for ranks of which nothing is heard.
        Raises:
            UsageError: they do not agree; the message names what, with ranks and values.
            RankRefusedError: another rank refuses to start, or died.
            EnvironmentMismatchError: ranks are missing after `timeout`.
        """
        store = self._store
        if store is None or self._is_over:
            return
        # Bring this rank's items; the last rank to arrive compares all.
        store.set(f"items/{self._rank}", json.dumps(self._items))
        store.set(f"hash/{self._rank}", content_hash(self._items))
        if store.add(_ARRIVED, 1) == self._num_ranks:
            self._give(None, UsageError.exit_code, self._difference())
        # Wait for the verdict of whoever gives it.
        verdict = self._verdict(timeout)
        self._is_over = True
        if not verdict["text"]:
            return
        # Rank 0 leaves last where it serves the store.
        self._see(_TOLD_S if self._serves else _LEAVE_S)
        if verdict["rank"] is None:
            raise UsageError(
                "the ranks of this job do not agree, so none starts:\n  "
                f"{verdict['text']}\nGive all ranks one plan and one command line."
            )
        raise RankRefusedError(
            f"rank {verdict['rank']} {verdict['text']}\nSo no rank starts.", verdict["code"]
        )

    @contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Tell all ranks when this one does not come to the meeting, for whatever reason."""
        try:
            yield
        except BaseException as error:
            # An exit with status 0 is no refusal.
            leaves_well = isinstance(error, SystemExit) and not error.code
            if not (leaves_well or self._is_over or self._store is None):
                self._refuse(error)
            raise

    def _refuse(self, error: BaseException) -> None:
        self._is_over = True
        code = error.exit_code if isinstance(error, HeteroError) else 1
        said = str(error) if isinstance(error, HeteroError) else repr(error)
        host = Place.here(self._rank, "").host
        try:
            self._give(self._rank, code, f"on {host} refuses to start: {said}")
            self._see(_TOLD_S)
        except RuntimeError as lost:
            print(f"> the other ranks could not be told: {lost}", file=sys.stderr, flush=True)

    def _difference(self) -> str:
        """Return what differs between the ranks; "" if nothing does."""
        ranks = range(self._num_ranks)
        hashes = {rank: self._get(f"hash/{rank}") for rank in ranks}
        kinds: dict[str, list[int]] = {}
        for rank, found in hashes.items():
            # Equal hashes stand for equal items: one rank of each kind is read.
            kinds.setdefault(found, []).append(rank)
        if len(kinds) == 1:
            return ""
        items = {r: json.loads(self._get(f"items/{r[0]}")) for r in map(tuple, kinds.values())}
        hosts = {rank: Place.of(self._get(f"place/{rank}")).host for rank in ranks}
        return disagreement({r: own for some, own in items.items() for r in some}, hosts)

    def _give(self, rank: int | None, code: int, text: str) -> None:
        verdict = json.dumps({"rank": rank, "code": code, "text": text})
        assert self._store is not None
        # The first verdict stands.
        self._store.compare_set(_VERDICT, "", verdict)

    def _get(self, key: str) -> str:
        assert self._store is not None
        return self._store.get(key).decode()

    def _verdict(self, timeout: timedelta) -> dict[str, Any]:
        began = told = time.monotonic()
        # Between two questions look for dead processes, and now and then name the missing ranks.
        while not self._comes(_VERDICT, _LOOK_S):
            self._look_for_the_dead()
            now = time.monotonic()
            if now - told > _NEWS_S:
                told = now
                missing = some_of([str(rank) for rank in self._missing()])
                print(f"> megatron-hetero: waiting for rank {missing}", flush=True)
            if now - began > timeout.total_seconds():
                missing = some_of([str(rank) for rank in self._missing()])
                raise EnvironmentMismatchError(
                    f"rank {missing} did not come within {timeout} (--distributed-timeout-minutes)."
                    f" Start {self._num_ranks} processes in all, and see why these do not run."
                )
        found: dict[str, Any] = json.loads(self._get(_VERDICT))
        return found

    def _comes(self, key: str, seconds: float) -> bool:
        """Tell if a key is there within `seconds`.

        A store over TCP logs a trace for each of its own waits that ends without the key, so this
        asks now and then.
        """
        assert self._store is not None
        deadline = time.monotonic() + seconds
        try:
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    return False
                time.sleep(_ASK_S)
        except RuntimeError as error:
            raise RankRefusedError(
                "the place where the ranks meet is gone: rank 0 on "
                f"{os.environ.get('MASTER_ADDR')}, or its launcher, has ended "
                f"({str(error).partition(chr(10))[0]})",
                EXIT_RANK_DIED,
            ) from error
        return True

    def _missing(self) -> list[int]:
        assert self._store is not None
        return [r for r in range(self._num_ranks) if not self._store.check([f"hash/{r}"])]

    def _look_for_the_dead(self) -> None:
        """Give the verdict if a process of this machine ended without a word."""
        assert self._store is not None
        here = Place.here(self._rank, "")
        for rank in self._neighbours():
            # A rank with a hash has arrived; the process of a rank without a place is unknown.
            if self._store.check([f"hash/{rank}"]) or not self._store.check([f"place/{rank}"]):
                continue
            place = Place.of(self._get(f"place/{rank}"))
            if place.machine == here.machine and not place.is_alive():
                self._give(rank, EXIT_RANK_DIED, f"on {place.host} died before the ranks met.")

    def _neighbours(self) -> range:
        """Return ranks that the launcher says are of this machine; all if it does not say."""
        local, size = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
        if local is None or size is None:
            return range(self._num_ranks)
        # Launchers number the ranks of a machine one after the other.
        first = self._rank - int(local)
        return range(max(first, 0), min(first + int(size), self._num_ranks))

    def _see(self, at_most_s: float) -> None:
        """Wait until all ranks know the verdict: a launcher ends all as soon as one has left.

        Rank 0 may end the store with itself; whoever finds it gone knows the verdict by then.
        """
        assert self._store is not None
        with suppress(RankRefusedError, RuntimeError):
            # The last rank to know lets all the others go.
            if self._store.add(_SEEN, 1) == self._num_ranks:
                self._store.set(_ALL_SEEN, "1")
            deadline = time.monotonic() + at_most_s
            while time.monotonic() < deadline and not self._comes(_ALL_SEEN, _LOOK_S):
                if not any(self._is_on_its_way(rank) for rank in range(self._num_ranks)):
                    return  # those who did not see it died

    def _is_on_its_way(self, rank: int) -> bool:
        """Tell if a rank may still read the verdict."""
        assert self._store is not None
        # This rank knows; a rank that has not announced itself may still come.
        if rank == self._rank or not self._store.check([f"place/{rank}"]):
            return rank != self._rank
        place, here = Place.of(self._get(f"place/{rank}")), Place.here(self._rank, "")
        return place.machine != here.machine or place.is_alive()


MEETING = StartMeeting()
"""The meeting of this process's job."""
