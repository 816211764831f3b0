"""Ctrl-C: answered at once by a line, and by the system itself when it is pressed again."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from megatron_hetero.collector import keep_from_collector
from megatron_hetero.errors import EXIT_INTERRUPTED


@contextmanager
def answered_interrupts(say: Callable[[str], None]) -> Iterator[None]:
    """Answer the first Ctrl-C of a verb with a line and `KeyboardInterrupt`; the second cuts short
    what the verb then still does to end well.

    Args:
        say: prints a line to people.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is told of signals
        return

    def answer(signal_number: int, frame: FrameType | None) -> NoReturn:
        # The next Ctrl-C is the system's, which ends the process at once.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        say("interrupted: ending what runs (Ctrl-C again stops at once)")
        raise KeyboardInterrupt

    # The handler of before comes back, for programs that call a verb as a function.
    before = signal.signal(signal.SIGINT, answer)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def leave(code: int) -> NoReturn:
    """End the process.  After Ctrl-C without the interpreter's own clean-up, which takes seconds
    once torch is loaded."""
    if code != EXIT_INTERRUPTED:
        keep_from_collector()
        sys.exit(code)
    # `os._exit` writes out nothing that is still in buffers.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
