"""Launch of a job's ranks as forked processes of this machine, which meet through a file.

Torch and Megatron are imported once and then forked, which starts eight ranks in the time that
`torchrun` takes to import them once. The store is a file and gloo uses the loopback interface, so
no port is opened to the network. On GPUs the parent must not have used CUDA, which does not
survive a fork; ranks share the cards where a machine has fewer of them (`rank_environment`).
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

from megatron_hetero.errors import (
    EXIT_RANK_DIED,
    EnvironmentMismatchError,
    FileFormatError,
    HeteroError,
    InfeasiblePlanError,
)
from megatron_hetero.flags.environment import CONNECTIONS_VARIABLE
from megatron_hetero.runtime.faults import unfinished
from megatron_hetero.runtime.job.one_machine import LOCAL_STORE

# Seconds between SIGTERM and SIGKILL.
_KILL_AFTER_FAILURE_S = 2.0
# Seconds between two looks at the children.
_POLL_S = 0.02
_STACK_S = 1.0
"""Time for ranks to write their Python stacks, in seconds."""
# Lines of a rank's stack in a message; faulthandler writes the innermost call first.
_STACK_LINES = 9
_FOR_RANKS = (
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.training.training",
    "megatron_hetero.runtime.job.attachments",
    "megatron_hetero.runtime.job.entry",
    "megatron_hetero.runtime.model.gpt",
    "megatron_hetero.runtime.state.safety",
    "torch.utils.serialization.config",
)
"""Modules that together import everything for a rank, in part late."""


class RankFailedError(HeteroError):
    """Failure of a rank of a local run; the message has the end of its log.

    `status` is the exit code of a refusal (`errors`), which becomes the run's; any other value is
    that of a rank that died.
    """

    def __init__(self, message: str, status: int = EXIT_RANK_DIED) -> None:
        super().__init__(message)
        self.exit_code = status if status in _REFUSALS else EXIT_RANK_DIED


_REFUSALS = frozenset(
    kind.exit_code
    for kind in (HeteroError, InfeasiblePlanError, FileFormatError, EnvironmentMismatchError)
)


@dataclass(frozen=True)
class LocalJob:
    """Job of `num_ranks` processes; each runs `function(rank)` in a world of the job.

    The log of rank r is `directory/rank-r.log`.
    """

    name: str
    num_ranks: int
    function: Callable[[int], None]
    directory: Path


@cache
def preload() -> None:
    """Load everything that ranks need, before the first fork.

    Warnings of torch and Megatron about missing GPUs, Transformer Engine and Apex are no news on a
    CPU and are hidden.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _FOR_RANKS:
            import_module(name)
        from megatron_hetero.runtime.job.agreement import agreed_versions
        from megatron_hetero.runtime.megatron import flag_texts, guards

        # What every rank would check, replace and hash for itself is inherited through the fork.
        guards.check_symbols(is_stock=False)
        flag_texts.apply()
        agreed_versions()


@contextmanager
def kept_folder(keep: Path | None, verb: str) -> Iterator[Path]:
    """Yield a folder for the files of a run: `keep`, which stays, or a temporary one.

    `verb` is the name of the run, for the name of a temporary folder.
    """
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=f"megatron-hetero-{verb}-") as folder:
        yield Path(folder)


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
        for job in jobs:
            started |= _start(job)
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
    running = _start(job)
    try:
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


def log_of(job: LocalJob, rank: int) -> str:
    """Return what a rank has written."""
    return _text(job, rank)


def _start(job: LocalJob) -> dict[int, tuple[LocalJob, int]]:
    # An empty file becomes the store through which the ranks meet.
    job.directory.mkdir(parents=True, exist_ok=True)
    handle, store = tempfile.mkstemp(dir=job.directory, prefix="store-")
    os.close(handle)
    started = {}
    # Text left in a buffer would be written by every child once more.
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # or ranks that collect garbage would copy every page of what was loaded for them
    for rank in range(job.num_ranks):
        pid = os.fork()
        # `_be_rank` never returns to this loop.
        if pid == 0:
            _be_rank(job, rank, store)
        started[pid] = (job, rank)
    gc.unfreeze()
    return started


def _be_rank(job: LocalJob, rank: int, store: str) -> None:
    """Run a job as a child process, and exit without the parent's clean-up."""
    code = 1
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent answers these as it likes
        signal.signal(number, signal.SIG_DFL)
    try:
        # Descriptors 1 and 2, because libraries in C write to them past `sys.stdout`.
        log = os.open(_log(job, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        # The parent may have put something else in the place of its own.
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        # A rank that hangs is asked for its stack (`_stacks`).
        unfinished.report_on_signal(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False, chain=True)
        import torch

        os.environ |= rank_environment(rank, job.num_ranks, store, torch.cuda.device_count())
        # All ranks share the cores of this machine.
        torch.set_num_threads(1)
        job.function(rank)
        code = 0
    except HeteroError as error:
        print(f"error: {error}", flush=True)
        code = error.exit_code
    except SystemExit as leaving:
        # As Python itself would: Megatron ends a run so at --exit-interval and its kind.
        print(f"left by sys.exit({leaving.code!r})", flush=True)
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        # The parent's message quotes the end of the log, and so this trace.
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def rank_environment(
    rank: int, num_ranks: int, store: str, num_cards: int = 0
) -> Mapping[str, str]:
    """Return the variables that `torchrun` would set, and the store of the ranks.

    Ranks share the cards of a machine that has too few.  NCCL refuses two ranks of one host on one
    card, and takes a rank with an `NCCL_HOSTID` of its own for a rank on another host; its messages
    then go through sockets on the loopback interface.

    Args:
        rank: the rank of the process.
        num_ranks: ranks of the job, all on this machine.
        store: path of the file through which the ranks meet.
        num_cards: GPUs that the ranks share; 0 on a CPU, or where each rank has what it sees and
            may compute fp32 as the user's job does.
    """
    shared = 0 < num_cards < num_ranks
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % num_cards if shared else rank),
        "WORLD_SIZE": str(num_ranks),
        # Ranks that share a card count as hosts of one rank each (`NCCL_HOSTID`).
        "LOCAL_WORLD_SIZE": str(1 if shared else num_ranks),
        LOCAL_STORE: store,
        "GLOO_SOCKET_IFNAME": "lo",
        **unfinished.RECORD,
        **(_connections() if num_ranks > 1 else {}),
        # fp32 is to be fp32: Transformer Engine asks cuBLAS for TF32 (`cublaslt_gemm.cu`).
        **({"NVIDIA_TF32_OVERRIDE": "0"} if num_cards else {}),
        **(_ON_A_SHARED_CARD | {"NCCL_HOSTID": f"rank-{rank}"} if shared else {}),
    }


def _connections() -> Mapping[str, str]:
    # Megatron insists on one for tensor and context parallelism; a user's own choice stays.
    return {CONNECTIONS_VARIABLE: os.environ.get(CONNECTIONS_VARIABLE, "1")}


_ON_A_SHARED_CARD = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    # Each channel of a communicator holds blocks of the card while it waits.
    "NCCL_MAX_NCHANNELS": "2",
    "NCCL_BUFFSIZE": str(1 << 20),
}


def _wait(
    running: dict[int, tuple[LocalJob, int]], timeout_s: float, on_poll: Callable[[], None] | None
) -> None:
    deadline = time.monotonic() + timeout_s
    while running:
        # The first failure ends the run: whatever else fails then is a consequence.
        for pid, code in _ended(running):
            job, rank = running.pop(pid)
            if code != 0:
                how = f"signal {-code}" if code < 0 else f"status {code}"
                raise RankFailedError(
                    f"{job.name}: rank {rank} of {job.num_ranks} ended with {how}; its log ends:\n"
                    + _tail(job, rank),
                    code,
                )
        if time.monotonic() > deadline:
            # Quote the end of one log, and where every rank stands.
            job, rank = next(iter(running.values()))
            last = _tail(job, rank)
            raise RankFailedError(
                f"{job.name}: not finished after {timeout_s:.0f} s; rank {rank} last wrote:\n"
                f"{last}\n{_stacks(running)}"
            )
        if on_poll is not None:
            on_poll()
        time.sleep(_POLL_S)


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
    before = {pid: len(_text(job, rank)) for pid, (job, rank) in running.items()}
    for pid in running:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)
    time.sleep(_STACK_S)
    found = []
    for pid, (job, rank) in running.items():
        lines = _text(job, rank)[before[pid] :].splitlines()
        # Marked lines name the communicators waited for; the rest is the stack.
        waits = [line for line in lines if line.startswith(unfinished.MARK)]
        calls = [line for line in lines if line not in waits][:_STACK_LINES]
        found += [f"{job.name}, rank {rank} is at:", *("  " + line for line in (*waits, *calls))]
    return "\n".join(found)


def _text(job: LocalJob, rank: int) -> str:
    try:
        return _log(job, rank).read_text(errors="replace")
    except OSError:
        return ""


def _log(job: LocalJob, rank: int) -> Path:
    return job.directory / f"rank-{rank}.log"


def _tail(job: LocalJob, rank: int) -> str:
    try:
        lines = _log(job, rank).read_text(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join("  " + line for line in lines[-12:])
