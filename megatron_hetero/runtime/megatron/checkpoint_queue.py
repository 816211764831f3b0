"""`core.dist_checkpointing.strategies.filesystem_async._results_queue`: a queue without a server.

Megatron's writer starts a manager process for a queue that, where checkpoints are written in the
process itself, only this process uses; starting it imports torch anew and takes longer than
everything else in a small job.  For jobs of this package's own, never for a user's training.
"""

from __future__ import annotations

import queue


def save_without_a_server() -> None:
    """Give the writer an ordinary queue, if this Megatron has one to replace."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async, "_results_queue"):
        filesystem_async._results_queue = queue.Queue()
