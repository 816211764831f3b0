"""Processes of one machine that start as ranks of a job, each left to end by itself."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.errors import HeteroError
from megatron_hetero.runtime.job.local.loading import preload
from megatron_hetero.runtime.job.local.ranks import rank_environment

LIMIT_S = 90.0
NEVER = 99
"""Code of a process that did not end within the limit."""


@dataclass(frozen=True)
class Start:
    """How the processes of one start ended, by rank."""

    codes: tuple[int, ...]
    logs: tuple[str, ...]
    seconds: float
    spread_s: float
    """From the first end of a process to the last."""

    @property
    def losses(self) -> list[str]:
        return [loss for log in self.logs for loss in re.findall(r"lm loss: (\S+)", log)]


def start_ranks(
    num_ranks: int,
    folder: Path,
    function: Callable[[int], None],
    stays: int | None = None,
    over_tcp: bool = False,
) -> Start:
    """Run `function(rank)` in forked processes, none of which is ended for another's sake.

    Args:
        num_ranks: number of processes.
        folder: for their logs and their store.
        function: the work of a rank.
        stays: rank that is not waited for, because it is stopped for ever.
        over_tcp: the ranks meet at a port of rank 0, as those of several machines do.
    """
    preload()
    meet_at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())} if over_tcp else {}
    began = time.monotonic()
    pids = {}
    for rank in range(num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(rank, num_ranks, folder, function, meet_at)
        pids[pid] = rank
    codes, ends = [NEVER] * num_ranks, []
    while set(pids.values()) - {stays} and time.monotonic() - began < LIMIT_S:
        for pid in list(pids):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pids.pop(pid)] = os.waitstatus_to_exitcode(status)
                ends.append(time.monotonic())
        time.sleep(0.02)
    for pid in pids:  # what hangs has the code `NEVER`
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    logs = tuple((folder / f"rank-{r}.log").read_text(errors="replace") for r in range(num_ranks))
    spread = max(ends) - min(ends) if ends else 0.0
    return Start(tuple(codes), logs, time.monotonic() - began, spread)


def _free_port() -> int:
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return int(asked.getsockname()[1])


def _be_rank(
    rank: int,
    num_ranks: int,
    folder: Path,
    function: Callable[[int], None],
    meet_at: Mapping[str, str],
) -> None:
    code = 1
    try:
        log = os.open(folder / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
        os.environ |= rank_environment(rank, num_ranks, str(folder / "store"))
        if meet_at:
            os.environ |= meet_at
            del os.environ["MEGATRON_HETERO_STORE"]
        import torch

        torch.set_num_threads(1)
        function(rank)
        code = 0
    except HeteroError as error:
        print(f"error: {error}", flush=True)
        code = error.exit_code
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
