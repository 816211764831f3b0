"""Python's collector of cycles, kept from what holds none."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Stop Python's collector of cycles: a search keeps many small objects, in no cycles, and to
    look through them again and again takes a sixth of its time, and of what is asked after it.
    Afterwards all that there is counts as old: it is looked through with the rest of the process,
    not at once."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # Both together move everything to the oldest generation, without a look at it.
            gc.freeze()
            gc.unfreeze()
            gc.enable()


def keep_from_collector() -> None:
    """Keep the collector of cycles from all that there is: it would look through modules again and
    again, and at the end through all that goes away anyway.

    Not once torch is loaded: triton, which comes with it, reports as leaks what nobody collects.
    """
    if not {"torch", "triton"} & sys.modules.keys():
        gc.freeze()
