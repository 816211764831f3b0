"""The other ranks, as a rank's watch sees them: who is dead, frozen or gone, or causes a stall.

A store has the newest beat of each rank; a process of the same machine can be asked itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch.distributed as dist

from megatron_hetero.runtime.faults.beat import Beat
from megatron_hetero.runtime.faults.limits import LOST_S, PERIOD_S, StallLimits
from megatron_hetero.runtime.faults.place import Place
from megatron_hetero.runtime.faults.progress import Phase

GRACE_S = 2.0
"""Seconds for a dying process to be dead, since connections close earlier, and for the reason to
arrive."""
_STOPPED_S = 20.0
"""A process of this machine that Linux calls stopped for so long does not go on by itself."""
_SILENT_S = 3 * PERIOD_S
"""A rank that published nothing for so long, while all others wait, is what these wait for."""


class OtherRanks:
    """The other ranks, as this rank sees them.

    Args:
        store: shared by all ranks.
        own: the place of this rank.
        num_ranks: ranks of the job.
        limits: how long a training thread may stay in a phase.
    """

    def __init__(
        self, store: dist.Store, own: Place, num_ranks: int, limits: StallLimits
    ) -> None:
        self._store, self._own, self._num_ranks = store, own, num_ranks
        self._limits = limits
        # Of all ranks, by rank; empty until the ranks have met.
        self.places: list[Place] = []
        # Rank -> (number of the newest beat seen, when it was first seen, by this rank's clock).
        self._seen: dict[int, tuple[int, float]] = {}
        # (what, rank) -> since when it has been so, by this rank's clock (`_lasts`).
        self._odd_since: dict[tuple[str, int], float] = {}
        # Rank -> number of its beat when all ranks were first found waiting.
        self._numbers: dict[int, int] = {}

    def meet(self) -> None:
        """Read the places of all ranks; waits for each."""
        for rank in range(self._num_ranks):
            self.places.append(Place.of(self._store.get(f"place/{rank}").decode()))

    def newest(self, rank: int) -> Beat | None:
        """Return the newest beat of a rank; None before its first."""
        key = f"beat/{rank}"
        # `get` of a key that is not there would block.
        return Beat.of(self._store.get(key).decode()) if self._store.check([key]) else None

    def all_are_done(self) -> bool:
        """Tell if all ranks have said that they end."""
        beats = [self.newest(rank) for rank in range(self._num_ranks)]
        return all(beat is not None and beat.phase is Phase.END for beat in beats)

    def on_this_machine(self) -> list[Place]:
        """Return the places of the other ranks of this machine."""
        here = self._own.machine
        return [p for p in self.places if p.machine == here and p.rank != self._own.rank]

    def looked_at(self) -> Sequence[int]:
        """Return the next rank of this machine and, for one rank of it, all of the next machine."""
        # Machines in the order of their first ranks, the same on all ranks.
        machines = list(dict.fromkeys(place.machine for place in self.places))
        here = [p.rank for p in self.places if p.machine == self._own.machine]
        # Every rank of a machine is looked at by the rank before, in a ring.
        found = [here[(here.index(self._own.rank) + 1) % len(here)]]
        # One rank of each machine looks at all ranks of the next machine, in a ring too.
        if here[0] == self._own.rank and len(machines) > 1:
            following = machines[(machines.index(self._own.machine) + 1) % len(machines)]
            found += [p.rank for p in self.places if p.machine == following]
        return [rank for rank in found if rank != self._own.rank]

    def fault_of(self, rank: int) -> str | None:
        """Return what is wrong with a rank's process or machine, in words; None if nothing is."""
        place, beat = self.places[rank], self.newest(rank)
        if beat is not None and beat.phase is Phase.END:
            return None
        # A process of this machine can be asked itself; of other machines only the beats tell.
        is_here = place.machine == self._own.machine
        if is_here and not place.is_alive():
            # It may have said that it is done, and ended, since its beat was read.
            return self.fault_of_dead(rank)
        if is_here and self._lasts("stopped", rank, place.is_stopped(), _STOPPED_S):
            return f"is frozen: its process has been stopped for {_STOPPED_S:.0f} s"
        # A beat newer than the one seen last: the process runs.
        number = 0 if beat is None else beat.number
        before, since = self._seen.get(rank, (-1, 0.0))
        if number != before:
            self._seen[rank] = number, time.monotonic()
            return None
        silent = time.monotonic() - since
        phase = Phase.SETUP if beat is None else beat.phase
        # A machine is gone only when none of its ranks is heard of any more.
        if place.machine != self._own.machine:
            others = [p.rank for p in self.places if p.machine == place.machine]
            is_lost = silent > LOST_S and not self._limits.is_announced(phase)
            if is_lost and all(self._silence(r) > LOST_S for r in others):
                return f"is gone, with its machine: nothing came from it for {silent:.0f} s"
        # The process lives, but even its watch does not run.
        elif silent > self._limits.silence_of(phase):
            return f"is frozen: its process has not run for {silent:.0f} s"
        return None

    def fault_of_dead(self, rank: int) -> str | None:
        """Return what ended a process; None if it was done, or may still be said to be."""
        beat = self.newest(rank)
        if beat is not None and beat.phase is Phase.END:
            return None
        if self._store.check([f"left/{rank}"]):
            # All ranks may be leaving for the same reason, each with its own words.
            is_old = self._lasts("left", rank, True, 2 * GRACE_S)
            return self._store.get(f"left/{rank}").decode() if is_old else None
        return "is dead"

    def cause_of_stall(self) -> tuple[int, str] | None:
        """Return the stalled rank that waits for no other, and what it does, in words; if there is
        none, the rank that stopped, or was stalled longest.  None: it cannot be told yet."""
        # All stalled ranks, also those that have stood for less time than this rank.
        beats = {r: self.newest(r) for r in range(self._num_ranks)}
        still = {
            rank: beat
            for rank, beat in beats.items()
            if beat is not None and beat.age_s > self._limits.floor_s / 2
        }
        if not still:
            return None
        if all(beat.waits for beat in still.values()):
            # For a rank that has stopped, perhaps, and whose newest beat is of when it went on.
            numbers = {rank: beat.number for rank, beat in beats.items() if beat is not None}
            if not self._lasts("waiting", self._own.rank, True, _SILENT_S):
                self._numbers = self._numbers or numbers
                return None
            silent = [r for r, n in numbers.items() if self._numbers.get(r) == n]
            for rank in (r for r in silent if r != self._own.rank):
                return rank, "is frozen: all others wait, and nothing comes from it"
        # First ranks that wait for nobody, then the earliest step, then the longest stand.
        cause = min(still, key=lambda r: (still[r].waits, still[r].step, -still[r].age_s, r))
        beat = still[cause]
        how = "waits for others, as all do" if beat.waits else "stands still"
        return cause, f"{how}, at {beat.line}"

    def training_goes_on(self) -> None:
        """Forget what an earlier wait has left."""
        self._lasts("waiting", self._own.rank, False, 0.0)
        self._numbers = {}

    def _silence(self, rank: int) -> float:
        before, since = self._seen.get(rank, (-1, time.monotonic()))
        beat = self.newest(rank)
        return time.monotonic() - since if beat is None or beat.number == before else 0.0

    def _lasts(self, what: str, rank: int, is_so: bool, seconds: float) -> bool:
        """Tell if something about a rank has been so for `seconds`."""
        if not is_so:
            self._odd_since.pop((what, rank), None)
            return False
        since = self._odd_since.setdefault((what, rank), time.monotonic())
        return time.monotonic() - since > seconds
