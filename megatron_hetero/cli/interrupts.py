"""Ctrl-C, SIGTERM and a closed terminal: answered at once by a line; the second time by the system.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import NoReturn

from megatron_hetero.collector import keep_from_collector
from megatron_hetero.errors import EXIT_INTERRUPTED

_WORDS: dict[int, str] = {
    signal.SIGINT: "interrupted: ending what runs (Ctrl-C again stops at once)",
    signal.SIGTERM: "asked to end by SIGTERM: ending what runs",
    signal.SIGHUP: "the terminal was closed: ending what runs",
}


@contextmanager
def answered_interrupts(say: Callable[[str], None]) -> Iterator[None]:
    """Answer the first Ctrl-C of a verb with a line and `KeyboardInterrupt`; the second cuts short
    what the verb then still does to end well.  So are `kill`, `timeout` and the end of a terminal
    answered: without that the ranks of a verb would outlive it, and its folders stay.

    Args:
        say: prints a line to people.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread is told of signals
        return

    def answer(signal_number: int, frame: FrameType | None) -> NoReturn:
        # The next one is the system's, which ends the process at once.
        for number in before:
            signal.signal(number, signal.SIG_DFL)
        # Nobody reads any more what is written to a terminal that was closed.
        with suppress(OSError):
            say(_WORDS[signal_number])
        raise KeyboardInterrupt

    # What is ignored, as by `nohup`, stays so.  The handlers of before come back, for programs that
    # call a verb as a function.
    before = {
        number: handler
        for number in _WORDS
        if (handler := signal.getsignal(number)) is not signal.SIG_IGN
    }
    for number in before:
        signal.signal(number, answer)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
