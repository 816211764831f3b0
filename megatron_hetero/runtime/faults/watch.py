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
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_hetero.errors import EXIT_RANK_DIED
from megatron_hetero.runtime.faults.limits import LOST_S, PERIOD_S, StallLimits
from megatron_hetero.runtime.faults.place import Place
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase

_VERDICT = "verdict"


@dataclass(frozen=True)
class Beat:
    """What a rank published: the `number` of the publication and where its training thread is.

    `age_s`: seconds since its stamp.  `waits`: it is in a call of torch's that waits for others.
    """

    number: int
    step: int
    phase: Phase
    age_s: float
    waits: bool
    line: str

    def text(self) -> str:
        """The form in the store."""
        fields = (self.number, self.step, self.phase.value, f"{self.age_s:.1f}", int(self.waits))
        return "\t".join([*map(str, fields), self.line])

    @staticmethod
    def of(text: str) -> Beat:
        """A beat from the store."""
        number, step, phase, age, waits, line = text.split("\t", 5)
        return Beat(int(number), int(step), Phase(phase), float(age), waits == "1", line)


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
        self._store, self._own, self._num_ranks = store, place, num_ranks
        self._limits, self._saves_on_sigterm = limits, saves_on_sigterm
        self._number = 0
        self._seen: dict[int, tuple[int, float]] = {}
        self._places: list[Place] = []
        self._main = threading.main_thread().ident
        self._woken, self._wake = os.pipe()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron-hetero watch", daemon=True)

    def start(self) -> None:
        """Meet the other ranks' watches, and watch.  Collective."""
        self._store.set(f"place/{self._own.rank}", self._own.text())
        self._places = [
            Place.of(self._store.get(f"place/{rank}").decode()) for rank in range(self._num_ranks)
        ]
        PROGRESS.listen(self._limits.learn)
        os.set_blocking(self._wake, False)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        self._thread.start()

    def stop(self) -> None:
        """Say that this rank is done, so that its end is no fault."""
        self._is_over.set()
        signal.set_wakeup_fd(-1)
        os.write(self._wake, b"\0")
        self._thread.join(timeout=5 * PERIOD_S)

    def _run(self) -> None:
        try:
            while not self._is_over.is_set():
                self._tick()
                woken, _, _ = select.select([self._woken], [], [], PERIOD_S)
                if woken and signal.SIGTERM in os.read(self._woken, 64):
                    self._terminated()
            self._store.set(f"beat/{self._own.rank}", self._beat(Phase.END).text())
        except RuntimeError as error:
            if not self._is_over.is_set():
                self._end(
                    f"rank {self._own.rank} cannot reach the others' store any more: the machine "
                    f"of rank 0, or the network to it, is gone ({error})"
                )

    def _tick(self) -> None:
        self._number += 1
        beat = self._beat(PROGRESS.current.phase)
        self._store.set(f"beat/{self._own.rank}", beat.text())
        if self._store.check([_VERDICT]):
            self._end(self._store.get(_VERDICT).decode())
        for rank in self._looked_at():
            fault = self._fault_of(rank)
            if fault is not None:
                self._accuse(rank, fault)
        if beat.age_s > self._limits.of(beat.phase, beat.step):
            self._look_for_the_cause()

    def _looked_at(self) -> Sequence[int]:
        """The next rank of this machine; and for one rank of it all of the next machine."""
        machines = list(dict.fromkeys(place.machine for place in self._places))
        here = [p.rank for p in self._places if p.machine == self._own.machine]
        found = [here[(here.index(self._own.rank) + 1) % len(here)]]
        if here[0] == self._own.rank and len(machines) > 1:
            following = machines[(machines.index(self._own.machine) + 1) % len(machines)]
            found += [p.rank for p in self._places if p.machine == following]
        return [rank for rank in found if rank != self._own.rank]

    def _fault_of(self, rank: int) -> str | None:
        place, beat = self._places[rank], self._newest(rank)
        if beat is not None and beat.phase is Phase.END:
            return None
        if place.machine == self._own.machine and not place.is_alive():
            # It may have said that it is done, and ended, since its beat was read.
            last = self._newest(rank)
            return None if last is not None and last.phase is Phase.END else "is dead"
        number = 0 if beat is None else beat.number
        before, since = self._seen.get(rank, (-1, 0.0))
        if number != before:
            self._seen[rank] = number, time.monotonic()
            return None
        silent = time.monotonic() - since
        phase = Phase.SETUP if beat is None else beat.phase
        if place.machine != self._own.machine:
            others = [p.rank for p in self._places if p.machine == place.machine]
            is_lost = silent > LOST_S and not self._limits.is_announced(phase)
            if is_lost and all(self._silence(r) > LOST_S for r in others):
                return f"is gone, with its machine: nothing came from it for {silent:.0f} s"
        elif silent > self._limits.silence_of(phase):
            return f"is frozen: its process has not run for {silent:.0f} s"
        return None

    def _silence(self, rank: int) -> float:
        before, since = self._seen.get(rank, (-1, time.monotonic()))
        beat = self._newest(rank)
        return time.monotonic() - since if beat is None or beat.number == before else 0.0

    def _look_for_the_cause(self) -> None:
        """Of all that stand still accuse the one that waits for nobody, or stands longest."""
        beats = {r: self._newest(r) for r in range(self._num_ranks)}
        still = {
            rank: beat
            for rank, beat in beats.items()
            if beat is not None and beat.age_s > self._limits.floor_s / 2
        }
        if not still:
            return
        cause = min(still, key=lambda r: (still[r].waits, still[r].step, -still[r].age_s, r))
        beat = still[cause]
        how = "waits for others, as all do" if beat.waits else "stands still"
        self._accuse(cause, f"{how}, at {beat.line}")

    def _accuse(self, rank: int, fault: str) -> None:
        beat = self._newest(rank)
        when = ""
        if beat is not None:
            when = f" It was last in step {beat.step}, phase {beat.phase}, for {beat.age_s:.0f} s."
        text = (
            f"{self._places[rank]} {fault}.{when} All ranks stop. Start the job again with --load "
            "to go on from its newest complete checkpoint."
        )
        self._end(self._store.compare_set(_VERDICT, "", text).decode())

    def _terminated(self) -> None:
        """SIGTERM: a launcher that ends all because one is dead deserves the reason."""
        for place in self._places:
            beat = self._newest(place.rank)
            has_ended = beat is not None and beat.phase is Phase.END
            if place.machine == self._own.machine and not place.is_alive() and not has_ended:
                self._accuse(place.rank, "is dead")
        if self._saves_on_sigterm:
            return
        print("> megatron-hetero: ended by SIGTERM", flush=True)
        os._exit(128 + signal.SIGTERM)

    def _end(self, verdict: str) -> None:
        self._is_over.set()
        sys.stdout.flush()
        print(f"error: {verdict}", file=sys.stderr, flush=True)
        os._exit(EXIT_RANK_DIED)

    def _newest(self, rank: int) -> Beat | None:
        key = f"beat/{rank}"
        return Beat.of(self._store.get(key).decode()) if self._store.check([key]) else None

    def _beat(self, phase: Phase) -> Beat:
        stamp = PROGRESS.current
        age = time.monotonic() - stamp.time_s
        waits, line = False, "-"
        if age > PERIOD_S:
            waits, line = _where(self._main)
        return Beat(self._number, stamp.step, phase, age, waits, line)


def _where(thread: int | None) -> tuple[bool, str]:
    """Whether a thread is in a wait of torch's, and the line of code that it is at."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return False, "-"
    stack = traceback.extract_stack(frame)
    waits = any("torch/distributed" in entry.filename for entry in stack[-3:])
    own = next((e for e in reversed(stack) if "torch/" not in e.filename), stack[-1])
    return waits, f"{os.path.basename(own.filename)}:{own.lineno} ({own.name})"


_running: Watch | None = None


def start_watch(
    rank: int,
    num_ranks: int,
    store_path: str | None,
    what: str,
    stall_limit_s: float,
    saves_on_sigterm: bool = False,
) -> None:
    """Watch this job's ranks from here on.  Collective; nothing for one rank, or a limit of 0.

    Args:
        store_path: the file through which the ranks meet, if there is one.
        what: this rank's GPU and place in the plan, for the message.
        stall_limit_s, saves_on_sigterm: of `StallLimits` and `Watch`.
    """
    global _running
    if num_ranks == 1 or stall_limit_s == 0:
        return
    store, place = _store(store_path, num_ranks), Place.here(rank, what)
    _running = Watch(store, place, num_ranks, StallLimits(stall_limit_s), saves_on_sigterm)
    _running.start()


def saves_on_sigterm(args: Any) -> bool:
    """Whether Megatron's `args` have it save and end on SIGTERM (`--exit-signal-handler`)."""
    return bool(args.exit_signal_handler) and args.exit_signal == signal.SIGTERM


def stop_watch() -> None:
    """End the watch of this process, if it has one: the job is done."""
    global _running
    if _running is not None:
        _running.stop()
    _running = None


def _store(path: str | None, num_ranks: int) -> dist.Store:
    """A store for the watches: a file beside the job's, or a connection of their own to its store.

    Args:
        path: of the file through which the job's ranks meet; None for `torchrun`'s store.
    """
    if path is not None:
        return dist.FileStore(f"{path}.watch", num_ranks)
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"megatron-hetero/watch/{life}", store)
