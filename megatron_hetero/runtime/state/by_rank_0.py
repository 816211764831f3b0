"""Acts on disk of rank 0 alone, whose failure all ranks hear."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_hetero.errors import HeteroError
from megatron_hetero.runtime.parallel.texts import broadcast_text


def failure_on_rank_0(act: Callable[[], None]) -> str | None:
    """Let rank 0 act.  Collective.

    Returns:
        None on all ranks if it went well; else the reason.
    """
    reason = None
    if dist.get_rank() == 0:
        try:
            act()
        except OSError as error:
            reason = words_of(error)
        except HeteroError as error:
            reason = str(error)
    flag = torch.tensor([reason is not None], dtype=torch.int, device=torch.cuda.current_device())
    dist.broadcast(flag, src=0)
    if not flag.item():
        return None
    # Each rank's last line names the cause, wherever a launcher looks for it.
    return broadcast_text(reason)


def words_of(error: OSError) -> str:
    """Return what the system refused, and where."""
    where = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{where}"
