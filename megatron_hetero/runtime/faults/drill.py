"""Faults on purpose: one rank, one step, one phase, and always the same.

A drill happens in the first life of a job alone: after `torchrun` has restarted it, the job runs
through.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import Literal, cast, get_args

from megatron_hetero.errors import UsageError
from megatron_hetero.runtime.faults.progress import OF_RANK_0, PROGRESS, Phase, Stamp

Fault = Literal["kill", "freeze", "spin", "no-space"]
_HOW_TO = '--hetero-drill takes FAULT@RANK:STEP:PHASE, for example "kill@1:30:steady"'
_SAVING = (Phase.SAVE_DATA, Phase.MANIFEST, Phase.RENAME, Phase.TRACKER, Phase.DELETE_OLD)


@dataclass(frozen=True)
class Drill:
    """A `fault` on `rank`, at the first entry into `phase` of `step` or of a later step.

    kill: SIGKILL.  freeze: SIGSTOP, the whole process.  spin: the training thread runs in a loop
    for ever.  no-space: the next write of a save fails as on a full disk.
    """

    fault: Fault
    rank: int
    step: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.fault}@{self.rank}:{self.step}:{self.phase.value}"


def parse_drill(text: str) -> Drill:
    """A drill from the command line.

    Raises:
        UsageError: says which part is wrong and what is allowed.
    """
    fault, at, place = text.partition("@")
    parts = place.split(":")
    if not at or len(parts) != 3 or not all(part.isdecimal() for part in parts[:2]):
        raise UsageError(f"{text!r}: {_HOW_TO}")
    if fault not in get_args(Fault):
        raise UsageError(f"{text!r}: no fault {fault!r}; {', '.join(get_args(Fault))}")
    phases = [phase.value for phase in Phase]
    if parts[2] not in phases:
        raise UsageError(f"{text!r}: no phase {parts[2]!r}; {', '.join(phases)}")
    drill = Drill(cast(Fault, fault), int(parts[0]), int(parts[1]), Phase(parts[2]))
    if drill.phase in OF_RANK_0 and drill.rank != 0:
        raise UsageError(f"{text!r}: rank 0 alone goes through {drill.phase.value}")
    if drill.fault == "no-space" and drill.phase not in _SAVING:
        raise UsageError(f"{text!r}: nothing is written in {drill.phase.value}; name a save's")
    return drill


def arm(drill: Drill, rank: int, num_ranks: int) -> None:
    """Arm the drill if it is for this rank; not in a job that was restarted.

    Raises:
        UsageError: the job has no such rank.
    """
    if drill.rank >= num_ranks:
        raise UsageError(f"--hetero-drill {drill}: the job has ranks 0 to {num_ranks - 1}")
    if drill.rank != rank or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return
    print(f"> megatron-hetero: drill: {drill}", flush=True)
    waiting = True

    def on_stamp(stamp: Stamp) -> None:
        nonlocal waiting
        if waiting and stamp.phase is drill.phase and stamp.step >= drill.step:
            waiting = False
            _happen(drill)

    PROGRESS.listen(on_stamp)
    # The process was in this phase before anybody listened.
    if drill.phase is Phase.START:
        PROGRESS.enter(Phase.START)


def _happen(drill: Drill) -> None:
    print(f"> megatron-hetero: drill: {drill} happens", flush=True)
    sys.stderr.flush()
    match drill.fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "spin":
            while True:
                time.monotonic()
        case "no-space":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
