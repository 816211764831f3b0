"""A function in a process of its own, so that its memory, core and changed modules are its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


def alone(function: Callable[..., Any], *given: object, one_core: bool = False) -> Any:
    """Return what a function of a module returns in a new process.

    Args:
        function: called there.
        given: its arguments, which are pickled.
        one_core: whether the process stays on one core.

    Raises:
        RuntimeError: the process died.
        Exception: what the function raised.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_send, args=(theirs, function, given, one_core))
    child.start()
    theirs.close()
    try:
        outcome = ours.recv()
    except EOFError:
        child.join()
        raise RuntimeError(f"{given}: its process ended with {child.exitcode}") from None
    child.join()
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _send(
    pipe: Connection, function: Callable[..., Any], given: tuple[object, ...], one_core: bool
) -> None:
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    try:
        pipe.send(function(*given))
    except Exception as error:
        pipe.send(error)
    finally:
        pipe.close()
