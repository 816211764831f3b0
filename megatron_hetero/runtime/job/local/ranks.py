"""Ranks as forks of this process: their environment, their logs, their ends."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TextIO

from megatron_hetero.errors import EnvironmentMismatchError, HeteroError
from megatron_hetero.flags.environment import CONNECTIONS_VARIABLE
from megatron_hetero.runtime.faults import unfinished
from megatron_hetero.runtime.job.local.jobs import LocalJob, log_path
from megatron_hetero.runtime.job.one_machine import LOCAL_STORE

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that ask a process to end."""


@contextmanager
def held_signals() -> Iterator[None]:
    """Hold signals that ask this process to end until the block is left.  What a handler raises
    inside of `os.fork` is lost, and what it raises behind loses the ranks that run already."""
    held: list[int] = []
    # Handlers are those of the main thread.
    numbers = ENDING if threading.current_thread() is threading.main_thread() else ()
    before = {
        number: signal.signal(number, lambda told, _frame: held.append(told))
        for number in numbers
        if callable(signal.getsignal(number))
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for told in held:
            signal.raise_signal(told)


def start(job: LocalJob, started: dict[int, tuple[LocalJob, int]]) -> None:
    """Fork the ranks of a job, and add job and rank by process id.

    Raises:
        EnvironmentMismatchError: the system starts no more processes; those in `started` run.
    """
    # An empty file becomes the store through which the ranks meet.
    job.directory.mkdir(parents=True, exist_ok=True)
    handle, store = tempfile.mkstemp(dir=job.directory, prefix="store-")
    os.close(handle)
    # Text left in a buffer would be written by every child once more.
    sys.stdout.flush()
    sys.stderr.flush()
    gc.freeze()  # or ranks that collect garbage would copy every page of what was loaded for them
    for rank in range(job.num_ranks):
        try:
            pid = os.fork()
        except OSError as error:
            gc.unfreeze()
            raise EnvironmentMismatchError(
                f"{job.name}: process {rank + 1} of {job.num_ranks} could not be started: "
                f"{error.strerror}. The system limits processes (`ulimit -u`, a container's pids) "
                "or memory; raise the limit, or take a plan for fewer devices."
            ) from error
        # `_be_rank` never returns to this loop.
        if pid == 0:
            _be_rank(job, rank, store)
        started[pid] = (job, rank)
    gc.unfreeze()


def _be_rank(job: LocalJob, rank: int, store: str) -> None:
    """Run a job as a child process, and exit without the parent's clean-up."""
    code = 1
    # The parent answers these as it likes, and what it ignores (`nohup`) stays ignored.
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    try:
        # Descriptors 1 and 2, because libraries in C write to them past `sys.stdout`; and those of
        # the parent's streams, if others: Megatron's log handler keeps `sys.stdout` as it was.
        log = os.open(log_path(job, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for descriptor in {1, 2, *_descriptors(sys.stdout, sys.stderr)}:
            os.dup2(log, descriptor)
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


def _descriptors(*streams: TextIO) -> Iterator[int]:
    """Yield the descriptors of the streams that have one."""
    for stream in streams:
        with suppress(AttributeError, OSError, ValueError):
            yield stream.fileno()


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
