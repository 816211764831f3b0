"""What the start of a job raised: a refusal that holds for the job, or a fault of this machine."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator
from typing import Any

from megatron_hetero.errors import CheckpointError, EnvironmentMismatchError, HeteroError

_OF_THIS_MACHINE = re.compile(
    r"\binstall|flashinfer|\b(py)?torch (version|>=|v?\d)|CUDA error|NVIDIA driver|no CUDA",
    re.IGNORECASE,
)
"""Words of refusals for a package or a driver, which the machines of the job may have."""


def of_plug_in(error: BaseException, number: int) -> dict[str, Any]:
    """Return the refusal of the plug-in's start on rank `number`, or why there is no telling."""
    # Anything but a refusal is a defect of ours, and no fault of the job's.
    is_of_here = isinstance(error, (EnvironmentMismatchError, CheckpointError))
    if is_of_here or not isinstance(error, HeteroError):
        return {"untold": f"{type(error).__name__}: {error}"}
    return {"refusal": {"said": str(error), "line": "", "rank": number, "is_quoted": False}}


def of_megatron(error: BaseException, errors: str, number: int) -> dict[str, Any]:
    """Return Megatron's refusal, or why there is no telling.

    Args:
        error: what Megatron raised.
        errors: what it printed to stderr before.
        number: the rank.
    """
    line = _statement(error)
    said = str(error) or line
    if isinstance(error, SystemExit):
        # Its parser has printed what is wrong before it leaves.
        said, line = errors.strip().rpartition("error: ")[2], ""
    elif isinstance(error, KeyError):  # its message is the key alone
        said = f"{type(error).__name__}: {said} at {line}"
    reasons = tuple(_chain(error))
    is_of_here = any(isinstance(e, (ImportError, OSError, MemoryError)) for e in reasons)
    if is_of_here or _OF_THIS_MACHINE.search(said):
        return {"untold": said}
    return {"refusal": {"said": said, "line": line, "rank": number, "is_quoted": True}}


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _statement(error: BaseException) -> str:
    """Return the lines of the statement that raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    first = frame.lineno or 0
    last = frame.end_lineno or first
    return "".join(linecache.getline(frame.filename, n) for n in range(first, last + 1)).strip()
