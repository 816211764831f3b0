"""Stores beside the store of a job's process groups: for the meeting and for the watch.

They use the launcher's own store, or a file beside the job's; no port is opened that torch would
not open itself.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from megatron_hetero.errors import EnvironmentMismatchError


def side_store(name: str, path: str | None, rank: int, num_ranks: int) -> dist.Store | None:
    """Return a store of one purpose, shared by all ranks of this start of the job.

    Rank 0 serves the store where neither a file nor `torchrun` does, as torch's own rendezvous
    would; torch then uses the same server.

    Args:
        name: the purpose.
        path: file through which the job's ranks meet; None for a store over TCP.
        rank: this process's rank.
        num_ranks: number of ranks in the job.
    Returns:
        None if the environment names no place to meet.
    Raises:
        EnvironmentMismatchError: nobody answers at MASTER_ADDR and MASTER_PORT.
    """
    # A job that meets through a file has its stores beside it.
    if path is not None:
        return dist.FileStore(f"{path}.{name}", num_ranks)
    # Without an address there is no other machine to meet.
    if "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        return None
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    # The same address as torch's rendezvous, so that no port is opened beside it.
    try:
        store = dist.TCPStore(
            host,
            int(port),
            is_master=rank == 0 and not launcher_serves(),
            wait_for_workers=False,
            multi_tenant=True,
            timeout=timedelta(minutes=10),
        )
    except (RuntimeError, ValueError) as error:
        raise EnvironmentMismatchError(
            f"rank {rank} cannot meet the others at {host}, port {port} (MASTER_ADDR, "
            f"MASTER_PORT): {error}. Rank 0, or its launcher, has to run there, and no "
            "firewall may stand between."
        ) from error
    # A restarted job must not read what the former start wrote.
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"megatron-hetero/{name}/{life}", store)


def launcher_serves() -> bool:
    """Tell if `torchrun` serves the store, which then outlives rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
