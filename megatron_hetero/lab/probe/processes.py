"""Fresh processes of this machine that measure together and meet through a file.

CUDA and Megatron's global state survive neither a fork nor a second model.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from megatron_hetero.errors import CheckFailedError
from megatron_hetero.runtime.job.local.ranks import rank_environment

_POLL_S = 0.1


def run_ranks(
    module: str,
    arguments: Sequence[str],
    num_ranks: int,
    folder: Path,
    variables: Mapping[str, str],
    limit_s: float = 900.0,
) -> None:
    """Run `python -m MODULE ARGUMENTS` as so many ranks, and wait for all of them.

    Args:
        folder: for the store and the ranks' logs; empty before.
        variables: of their environment, beside this process's own.
        limit_s: limit for all of them, in seconds.
    Raises:
        CheckFailedError: a process ended badly or not at all; carries the end of its log.
    """
    (folder / "store").touch()
    words = (module, *arguments)
    # The parent meets nobody: the ranks meet each other through the store.
    ranks = [_start(words, rank, num_ranks, folder, variables) for rank in range(num_ranks)]
    try:
        _wait(ranks, folder, limit_s)
    finally:
        # A rank that outlives the measurement would keep its card.
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()


def _start(
    words: Sequence[str], rank: int, num_ranks: int, folder: Path, variables: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **rank_environment(rank, num_ranks, str(folder / "store")),
        "MASTER_ADDR": "127.0.0.1",
        **variables,
    }
    environment.setdefault("OMP_NUM_THREADS", "1")
    with (folder / f"rank-{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *words], stdout=log, stderr=subprocess.STDOUT, env=environment
        )


def _wait(ranks: Sequence[subprocess.Popen[bytes]], folder: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    # One rank that fails ends the wait, for its group would wait in vain.
    while any(process.poll() is None for process in ranks):
        codes = [process.poll() for process in ranks]
        if any(codes) or time.monotonic() > deadline:
            break
        time.sleep(_POLL_S)
    failed = [rank for rank, process in enumerate(ranks) if process.poll()]
    # The other ranks get a moment to end as well and write why.
    for process in ranks:
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=2.0)
    codes = [process.poll() for process in ranks]
    # The first to fail is to blame, then others that failed, then those that never ended.
    failed += [rank for rank, code in enumerate(codes) if code]
    failed += [rank for rank, code in enumerate(codes) if code is None]
    if failed:
        rank, code = failed[0], codes[failed[0]]
        log = (folder / f"rank-{rank}.log").read_text(errors="replace").splitlines()
        how = f"did not end in {limit_s:.0f} s" if code is None else f"ended with {code}"
        raise CheckFailedError(
            f"rank {rank} of the probe {how}; it last wrote:\n"
            + "\n".join("  " + line for line in log[-12:])
        )
