"""A job of this machine's processes, the logs of its ranks, and its failure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.errors import (
    EXIT_RANK_DIED,
    EnvironmentMismatchError,
    FileFormatError,
    HeteroError,
    InfeasiblePlanError,
)


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


def log_of(job: LocalJob, rank: int) -> str:
    """Return what a rank has written."""
    try:
        return log_path(job, rank).read_text(errors="replace")
    except OSError:
        return ""


def log_path(job: LocalJob, rank: int) -> Path:
    """Return the path of a rank's log."""
    return job.directory / f"rank-{rank}.log"


def end_of_log(job: LocalJob, rank: int) -> str:
    """Return the last lines of a rank's log."""
    try:
        lines = log_path(job, rank).read_text(errors="replace").splitlines()
    except OSError as error:
        return f"(no log: {error})"
    return "\n".join("  " + line for line in lines[-12:])
