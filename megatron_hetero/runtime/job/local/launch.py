"""Launch of a job's ranks as forked processes of this machine, which meet through a file.

Torch and Megatron are imported once and then forked, which starts eight ranks in the time that
`torchrun` takes to import them once. The store is a file and gloo uses the loopback interface, so
no port is opened to the network. On GPUs the parent must not have used CUDA, which does not
survive a fork; ranks share the cards where a machine has fewer of them (`ranks.rank_environment`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from megatron_hetero.runtime.faults import unfinished
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError, end_of_log, log_of
from megatron_hetero.runtime.job.local.loading import preload
from megatron_hetero.runtime.job.local.ranks import held_signals, start

# Seconds between SIGTERM and SIGKILL.
_KILL_AFTER_FAILURE_S = 2.0
# Seconds between two looks at the children.
_POLL_S = 0.02
_STACK_S = 1.0
"""Time for ranks to write their Python stacks, in seconds."""
# Lines of a rank's stack in a message; faulthandler writes the innermost call first.
_STACK_LINES = 9


def run_jobs(
    jobs: Sequence[LocalJob], timeout_s: float, on_poll: Callable[[], None] | None = None
) -> None:
    """Run jobs side by side and wait for all of them.

    Args:
        jobs: the jobs.
        timeout_s: limit for all of them together, in seconds.
        on_poll: called often while they run.
    Raises:
        RankFailedError: a rank failed, or the time was up; all other ranks have been ended.
    """
    preload()
    started: dict[int, tuple[LocalJob, int]] = {}
    try:
        with held_signals():
            for job in jobs:
                start(job, started)
        _wait(started, timeout_s, on_poll)
    finally:
        _end(started)


def run_without_rank(job: LocalJob, lost: int, timeout_s: float) -> Mapping[int, int]:
    """Run a job that loses a rank by itself; no rank is ended for another's sake.

    Args:
        job: the job.
        lost: the rank, which need not end: it may be stopped for ever.
        timeout_s: limit for all other ranks, in seconds.
    Returns:
        Rank -> its exit code, below zero that of a signal; of all ranks that ended.
    Raises:
        RankFailedError: the time was up before all others had ended.
    """
    preload()
    codes: dict[int, int] = {}
    running: dict[int, tuple[LocalJob, int]] = {}
    try:
        with held_signals():
            start(job, running)
        # The lost rank may never end, so the wait is for all others.
        deadline = time.monotonic() + timeout_s
        while any(rank != lost for _, rank in running.values()):
            for pid, code in _ended(running):
                _, rank = running.pop(pid)
                codes[rank] = code
            if time.monotonic() > deadline:
                left = {pid: one for pid, one in running.items() if one[1] != lost}
                raise RankFailedError(
                    f"{job.name}: ranks {', '.join(str(rank) for _, rank in left.values())} go on "
                    f"{timeout_s:.0f} s after the start without rank {lost}\n{_stacks(left)}"
                )
            time.sleep(_POLL_S)
    finally:
        _end(running)
    return codes


def _wait(
    running: dict[int, tuple[LocalJob, int]], timeout_s: float, on_poll: Callable[[], None] | None
) -> None:
    deadline = time.monotonic() + timeout_s
    while running:
        # The first failure ends the run: whatever else fails then is a consequence.
        for pid, code in _ended(running):
            job, rank = running.pop(pid)
            if code != 0:
                how = _killed(-code) if code < 0 else f"status {code}"
                raise RankFailedError(
                    f"{job.name}: rank {rank} of {job.num_ranks} ended with {how}; its log ends:\n"
                    + end_of_log(job, rank),
                    code,
                )
        if time.monotonic() > deadline:
            # Quote the end of one log, and where every rank stands.
            job, rank = next(iter(running.values()))
            last = end_of_log(job, rank)
            raise RankFailedError(
                f"{job.name}: not finished after {timeout_s:.0f} s; rank {rank} last wrote:\n"
                f"{last}\n{_stacks(running)}"
            )
        if on_poll is not None:
            on_poll()
        time.sleep(_POLL_S)


def _killed(number: int) -> str:
    """Put the signal that ended a rank in words."""
    # Only the kernel's log tells whose SIGKILL it was.
    of_memory = ", which Linux sends where memory runs out" if number == signal.SIGKILL else ""
    names = {s.value: s.name for s in signal.Signals}
    return f"signal {number} ({names.get(number, 'real-time')}{of_memory})"


def _ended(running: Mapping[int, tuple[LocalJob, int]]) -> Iterator[tuple[int, int]]:
    """Yield (pid, exit code) of the children that have ended; other children are not touched."""
    for pid in list(running):
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            yield pid, os.waitstatus_to_exitcode(status)


def _end(running: dict[int, tuple[LocalJob, int]]) -> None:
    # Ranks may clean up on SIGTERM; whatever is left then is killed.
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        for pid in list(running):
            try:
                os.kill(pid, signal_number)
            except ProcessLookupError:
                running.pop(pid, None)
        deadline = time.monotonic() + _KILL_AFTER_FAILURE_S
        while running and time.monotonic() < deadline:
            for pid, _ in _ended(running):
                running.pop(pid)
            time.sleep(_POLL_S)


def _stacks(running: Mapping[int, tuple[LocalJob, int]]) -> str:
    """Ask every rank that runs where it is; return the innermost calls of its Python stack and the
    communicators that it waits in."""
    # Only what a rank writes after the signal is the answer.
    before = {pid: len(log_of(job, rank)) for pid, (job, rank) in running.items()}
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACK_S)
    found = []
    for pid, (job, rank) in running.items():
        lines = log_of(job, rank)[before[pid] :].splitlines()
        # Marked lines name the communicators waited for; the rest is the stack.
        waits = [line for line in lines if line.startswith(unfinished.MARK)]
        calls = [line for line in lines if line not in waits][:_STACK_LINES]
        found += [f"{job.name}, rank {rank} is at:", *("  " + line for line in (*waits, *calls))]
    return "\n".join(found)
