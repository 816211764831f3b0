"""Standard output that holds the command's JSON object alone."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_STDOUT, _STDERR = 1, 2


@contextmanager
def own_stdout(is_json: bool) -> Iterator[None]:
    """Send to stderr what libraries print on stdout from C, past `sys.stdout`.

    scipy's HiGHS does so now and then (`HighsMipSolverData::transformNewIntegerFeasibleSolution`),
    and a reader of JSON would stumble over it.  Python's own `sys.stdout` goes where it went.

    Args:
        is_json: whether the command promised one JSON object; else nothing is done.
    """
    # Text for people may mix; a captured stdout (in a test) has no C library behind it.
    if not is_json or not _is_stdout():
        yield
        return
    before = sys.stdout
    before.flush()
    # Number 1, which C writes to, becomes stderr; Python writes to a copy of what it was.
    kept = os.dup(_STDOUT)
    os.dup2(_STDERR, _STDOUT)
    sys.stdout = open(kept, "w", encoding=before.encoding, errors=before.errors)  # noqa: SIM115
    try:
        yield
    finally:
        # The C library writes into a pipe when its buffer is full; it must not keep anything back.
        with suppress(OSError, TypeError, AttributeError):
            ctypes.CDLL(None).fflush(None)
        # Back in the opposite order.
        os.dup2(kept, _STDOUT)
        own, sys.stdout = sys.stdout, before
        own.close()


def _is_stdout() -> bool:
    """Return whether `sys.stdout` is the process's standard output, and nothing in its place."""
    try:
        return sys.stdout.fileno() == _STDOUT
    except (AttributeError, OSError, ValueError):
        return False
