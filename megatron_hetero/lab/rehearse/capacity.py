"""How many ranks a machine can rehearse."""

from __future__ import annotations

import os

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.runtime.job.local.capacity import most_processes

RANKS_PER_CORE = 16
"""Most ranks per core; with more the turns, and so the time scale, become too long."""


def most_ranks() -> int:
    """Return the most ranks that this machine can rehearse, by free memory and cores."""
    cores = len(os.sched_getaffinity(0))
    return min(most_processes(), cores * RANKS_PER_CORE)


def check_capacity(num_ranks: int) -> None:
    """Refuse a rehearsal that this machine cannot run.

    Raises:
        EnvironmentMismatchError: there are too many ranks; the message says how many are possible.
    """
    most = most_ranks()
    if num_ranks > most:
        raise EnvironmentMismatchError(
            f"rehearsing this plan takes {num_ranks} processes, one for each GPU; this machine "
            f"({len(os.sched_getaffinity(0))} cores) rehearses up to {most}. Use a larger machine, "
            "or `megatron-hetero simulate`, which needs no processes."
        )
