"""A watch over all ranks of a job: who is dead, who stands still, and one message for all.

Every rank has a watching thread.  Once a second it publishes, over a store of its own, the newest
stamp of its *training* thread (`progress`), and looks at a few others: whether the next process of
this machine lives, whether that one's publications go on, and, on one rank of each machine, whether
anything comes from the next machine.  A training thread that has not stamped for longer than its
phase allows is looked into: of all ranks that stand still, the one that is not waiting for another
is the cause.

The first to find a fault writes it into the store; all ranks print it and leave, so that a launcher
can start them again.  No port is opened: the store is the job's own, or a file beside it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace

import torch.distributed as dist

from megatron_hetero.errors import EXIT_RANK_DIED, HeteroError
from megatron_hetero.runtime.faults.beat import Beat, is_lost_connection, where
from megatron_hetero.runtime.faults.limits import LOST_S, PERIOD_S, StallLimits
from megatron_hetero.runtime.faults.others import GRACE_S, OtherRanks
from megatron_hetero.runtime.faults.place import Place
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.faults.store import launcher_serves
from megatron_hetero.runtime.faults.unfinished import card_waits

_VERDICT = "verdict"
# Seconds between two looks at the store or at a process, while this rank waits.
_LOOK_S = 0.05
_TOLD_S = 4 * PERIOD_S
"""Limit on the wait of the store's server until all ranks have read a verdict."""


class Watch:
    """The watch of one rank.

    Args:
        store: shared by all ranks, and used by nothing else.
        place: of this rank.
        limits: how long a training thread may stay in a phase.
        saves_on_sigterm: Megatron answers SIGTERM itself: it saves and ends.
    """

    def __init__(
        self,
        store: dist.Store,
        place: Place,
        num_ranks: int,
        limits: StallLimits,
        saves_on_sigterm: bool = False,
    ) -> None:
        self._store, self._own = store, place
        self._limits, self._saves_on_sigterm = limits, saves_on_sigterm
        # Number of this rank's newest beat.
        self._number = 0
        self._others = OtherRanks(store, place, num_ranks, limits)
        self._main = threading.main_thread().ident
        # Signals wake the thread through a pipe: Python runs handlers on the training thread alone,
        # which may stand in a collective.
        self._woken, self._wake = os.pipe()
        # Whom signals woke before (`unfinished.report_on_signal`), as a process has one such pipe.
        self._woken_before = -1
        self._is_over = threading.Event()
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="megatron-hetero watch", daemon=True)

    def start(self) -> None:
        """Meet the other ranks' watches, and watch.  Collective.

        Rank 0 may have met all and died while others still read.
        """
        try:
            self._store.set(f"place/{self._own.rank}", self._own.text())
            self._others.meet()
        except dist.DistNetworkError as gone:
            self._end(self._without_store(gone))
        PROGRESS.listen(self._limits.learn)
        os.set_blocking(self._wake, False)
        # A signal without a Python handler would end the process before the watch could say why.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        self._woken_before = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Announce the end of this rank, for the end to be no fault."""
        self._is_over.set()
        signal.set_wakeup_fd(self._woken_before, warn_on_full_buffer=False)
        os.write(self._wake, b"\0")
        self._thread.join(timeout=5 * PERIOD_S)
        self._serve_until_all_are_done()

    @property
    def _serves(self) -> bool:
        """Whether the store ends with this process."""
        is_file = isinstance(self._store, dist.FileStore)
        return self._own.rank == 0 and not launcher_serves() and not is_file

    def _serve_until_all_are_done(self) -> None:
        """Keep the store of a job without `torchrun` until all ranks have reached the end."""
        if not self._serves:
            return
        # A rank that hangs at its end does not hold up rank 0 for longer.
        deadline = time.monotonic() + 30.0
        while time.monotonic() < deadline:
            if self._others.all_are_done():
                return
            time.sleep(_LOOK_S)

    def describe(self, what: str) -> None:
        """Say more exactly what this rank is."""
        self._own = replace(self._own, what=what)
        self._store.set(f"place/{self._own.rank}", self._own.text())

    def failed(self, error: BaseException) -> None:
        """Find the cause of an error of the training thread.

        The death of a rank ends its connections, so that others fail before any watch has looked.
        Ends the process if another rank is the cause, or if connections failed though all live;
        returns if the error is this rank's own, of which the others learn.
        """
        # A lost connection may have its cause on another machine, whose silence takes longer to
        # see.
        lost = is_lost_connection(error)
        deadline = time.monotonic() + (LOST_S + 4 * PERIOD_S if lost else GRACE_S / 2)
        try:
            if isinstance(error, HeteroError):
                # All ranks may refuse the same, each with the status of the error.
                said = str(error).partition("\n")[0]
                self._store.set(f"left/{self._own.rank}", f"ended with an error: {said}")
                return
            # Meanwhile look for a verdict, or a dead neighbour on this machine.
            while time.monotonic() < deadline:
                self._end_if_told()
                self._end_if_one_is_dead()
                time.sleep(_LOOK_S)
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            # Nobody is dead, so the network is.
            if lost:
                self._accuse(
                    self._own.rank, f"lost its connection to others, though no rank died ({said})"
                )
            # Whoever loses the connection to this rank from now on knows why.
            text = self._accusation(self._own.rank, f"failed with {said}")
            self._store.compare_set(_VERDICT, "", text)
        # The store is gone as well, which says more than the error.
        except RuntimeError as gone:
            self._end(self._without_store(gone))

    def _end_if_told(self) -> None:
        if self._store.check([_VERDICT]):
            self._end(self._store.get(_VERDICT).decode())

    def _end_if_one_is_dead(self) -> None:
        """Look at the processes of this machine."""
        for place in self._others.on_this_machine():
            fault = None if place.is_alive() else self._others.fault_of_dead(place.rank)
            if fault is not None:
                self._accuse(place.rank, fault)

    def _without_store(self, error: RuntimeError) -> str:
        """Return what the loss of the store says: its server was on the machine of rank 0."""
        own = "Start the job again with --load to go on from its newest complete checkpoint."
        if not self._others.places:
            host = os.environ.get("MASTER_ADDR")
            gone = "or its launcher, is gone, with the ranks' store"
            return f"rank 0 on {host}, {gone} ({error}). {own}"
        first = self._others.places[0]
        # Where rank 0 serves the store and is on this machine, its death shows after a moment.
        if not launcher_serves():
            deadline = time.monotonic() + GRACE_S
            while first.machine == self._own.machine and time.monotonic() < deadline:
                if not first.is_alive():
                    return f"{first} is dead. All ranks stop. {own}"
                time.sleep(_LOOK_S)
        return (
            f"rank {self._own.rank} cannot reach the others' store any more: the machine of rank 0 "
            f"({first.host}), or the network to it, is gone ({error}). {own}"
        )

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._tick()
                # Sleep for a period, or until a signal comes.
                woken, _, _ = select.select([self._woken], [], [], PERIOD_S)
                numbers = os.read(self._woken, 64) if woken else b""
                if numbers and self._woken_before >= 0:
                    with suppress(BlockingIOError):  # a full pipe wakes its reader anyway
                        os.write(self._woken_before, numbers)
                if signal.SIGTERM in numbers:
                    self._terminated()
            # The last beat: from here on the silence of this rank is no fault.
            self._store.set(f"beat/{self._own.rank}", self._beat(Phase.END).text())
        except RuntimeError as error:
            # At the end of a job the store may be gone before this thread is.
            if not self._is_over.is_set():
                self._end(self._without_store(error))

    def _tick(self) -> None:
        # Publish, listen, then look at the others.
        self._number += 1
        beat = self._beat(PROGRESS.current.phase)
        self._store.set(f"beat/{self._own.rank}", beat.text())
        self._end_if_told()
        for rank in self._others.looked_at():
            fault = self._others.fault_of(rank)
            if fault is not None:
                self._accuse(rank, fault)
        # This rank's own training thread stands in its phase for longer than the phase may take.
        if beat.age_s > self._limits.of(beat.phase, beat.step):
            cause = self._others.cause_of_stall()
            if cause is not None:
                self._accuse(*cause)
        else:
            self._others.training_goes_on()

    def _accuse(self, rank: int, fault: str) -> None:
        text = self._accusation(rank, fault)
        # The first verdict stands: a later accusation gets the first one back.
        self._end(self._store.compare_set(_VERDICT, "", text).decode())

    def _accusation(self, rank: int, fault: str) -> str:
        place = Place.of(self._store.get(f"place/{rank}").decode())
        beat = self._others.newest(rank)
        when = ""
        if beat is not None:
            when = f" It was last in step {beat.step}, phase {beat.phase}, for {beat.age_s:.0f} s."
        return (
            f"{place} {fault}.{when} All ranks stop. Start the job again with --load "
            "to go on from its newest complete checkpoint."
        )

    def _terminated(self) -> None:
        """SIGTERM: a launcher that ends all because one is dead deserves the reason."""
        # A launcher ends all ranks when one has died: look a moment for the dead one.
        deadline = time.monotonic() + (0.0 if self._saves_on_sigterm else GRACE_S / 2)
        while True:
            self._end_if_told()
            self._end_if_one_is_dead()
            if time.monotonic() >= deadline:
                break
            time.sleep(_LOOK_S)
        # Megatron answers the signal by itself, with a last checkpoint.
        if self._saves_on_sigterm:
            return
        print("> megatron-hetero: ended by SIGTERM", flush=True)
        os._exit(128 + signal.SIGTERM)

    def _end(self, verdict: str) -> None:
        self._ending.acquire()  # of two threads one speaks; the process ends under it
        self._is_over.set()
        sys.stdout.flush()
        print(f"error: {verdict}", file=sys.stderr, flush=True)
        with suppress(RuntimeError):
            self._serve_until_all_are_told()
        os._exit(EXIT_RANK_DIED)

    def _serve_until_all_are_told(self) -> None:
        """Keep the store of this process until all live ranks know the verdict."""
        if self._own.rank != 0:
            self._store.set(f"told/{self._own.rank}", "1")
        if not self._serves:
            return
        # All others have to say that they know, except for dead processes of this machine.
        waits = [p for p in self._others.places if p.rank != 0]
        deadline = time.monotonic() + _TOLD_S
        while waits and time.monotonic() < deadline:
            waits = [p for p in waits if not self._store.check([f"told/{p.rank}"])]
            here = self._own.machine
            waits = [p for p in waits if p.machine != here or p.is_alive()]
            time.sleep(_LOOK_S)

    def _beat(self, phase: Phase) -> Beat:
        stamp = PROGRESS.current
        age = time.monotonic() - stamp.time_s
        waits, line = False, "-"
        # A recent stamp needs no look at the stack of the training thread.
        if age > PERIOD_S:
            waits, line = where(self._main)
            # Asked of a rank that stands still alone: the record queries events of the card.
            waits = waits or (age > self._limits.floor_s / 2 and card_waits())
        return Beat(self._number, stamp.step, phase, age, waits, line)
