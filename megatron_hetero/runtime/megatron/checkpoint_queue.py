"""Who serves the queue of Megatron's writer: `filesystem_async.get_write_results_queue`.

Megatron's writer starts a manager process for the queue by which its processes answer.  Nobody ends
that process where a rank is killed: it stays on the machine and holds the job's output open, so
that `torchrun ... | tee log` never ends.  Here the process ends with its rank.

Where checkpoints are written in the process itself, only this process uses the queue; starting the
server imports torch anew and takes longer than everything else in a small job.  Jobs of this
package's own do without, a user's training never.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import time
from multiprocessing.managers import SyncManager
from typing import Any

_LOOKS_EVERY_S = 1.0


def save_without_a_server() -> None:
    """Give the writer an ordinary queue, if this Megatron has one to replace."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async, "_results_queue"):
        filesystem_async._results_queue = queue.Queue()


def save_with_a_server_that_ends() -> None:
    """Let the server of the writer's queue end when this process has ended, however it ends."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if not hasattr(filesystem_async, "_results_queue"):
        return

    # As Megatron's own: no garbage is collected while a process is forked.
    @filesystem_async._disable_gc()
    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(mp_mode))
            manager.start(_end_with, (os.getpid(),))
            # The queue keeps its manager.
            filesystem_async._results_queue = manager.Queue()
        return filesystem_async._results_queue

    filesystem_async.get_write_results_queue = get_write_results_queue


def _end_with(parent: int) -> None:
    """End this process when its parent is another than process `parent`."""

    def look() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOKS_EVERY_S)
        os._exit(0)

    threading.Thread(target=look, daemon=True).start()
