"""The watch of this process: started, told more, asked for the cause of an error, stopped."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron_hetero.runtime.faults.limits import StallLimits
from megatron_hetero.runtime.faults.place import Place
from megatron_hetero.runtime.faults.store import side_store
from megatron_hetero.runtime.faults.watch import Watch

# Seconds for the watch to speak, after a launcher's SIGTERM.
_EXPLAINED_S = 10.0

_running: Watch | None = None


@contextmanager
def explained() -> Iterator[None]:
    """Let the watch name the rank to blame for an error inside, if not this rank."""
    try:
        yield
    except SystemExit as leaving:
        if _running is not None and leaving.code == 128 + signal.SIGTERM:
            # The watch is about to say why the launcher sent the signal, and ends the process.
            time.sleep(_EXPLAINED_S)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if _running is not None:
            _running.failed(error)
        raise


def describe_rank(what: str) -> None:
    """Describe this rank more exactly, once known."""
    if _running is not None:
        _running.describe(what)


def start_watch(
    rank: int,
    num_ranks: int,
    store_path: str | None,
    what: str,
    stall_limit_s: float,
    saves_on_sigterm: bool = False,
) -> None:
    """Watch this job's ranks from here on.  Collective; nothing for one rank, or a limit of 0.

    Args:
        store_path: the file through which the ranks meet, if there is one.
        what: this rank's GPU and place in the plan, for the message.
        stall_limit_s, saves_on_sigterm: of `StallLimits` and `Watch`.
    """
    global _running
    if num_ranks == 1 or stall_limit_s == 0:
        return
    store, place = side_store("watch", store_path, rank, num_ranks), Place.here(rank, what)
    if store is None:
        return
    _running = Watch(store, place, num_ranks, StallLimits(stall_limit_s), saves_on_sigterm)
    _running.start()


def saves_on_sigterm(args: Any) -> bool:
    """Return whether Megatron saves and ends on SIGTERM under `args` (`--exit-signal-handler`)."""
    return bool(args.exit_signal_handler) and args.exit_signal == signal.SIGTERM


def stop_watch() -> None:
    """End the watch of this process, if any: the job is done."""
    global _running
    if _running is not None:
        _running.stop()
    _running = None
