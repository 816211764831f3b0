"""Operations between ranks that this process has begun and that are not done.

A rank that hangs is in one of them.  torch keeps a record of what it gives its library (its flight
recorder), with the name of the communicator (`runtime.parallel.connecting.make_group` names each);
over gloo single messages are not in the record, so `wait_for` notes the messages that are waited
for.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist

MARK = "waits in"
"""First words of each line of a report."""
RECORD = {"TORCH_FR_BUFFER_SIZE": "256"}
"""Variable of torch, which has to be set before the first operation: operations of the record."""
_MOST_LINES = 3


_WAITED: dict[object, Sequence[dist.P2POp]] = {}
"""Messages of each wait that goes on. Threads wait side by side: a checkpoint's, or a prefetch's,
must not wipe out what the training thread waits for, nor the other way."""


def wait_for(works: Sequence[Any], messages: Sequence[dist.P2POp] = ()) -> None:
    """Wait for operations; let a report name the messages meanwhile, and the watch of this rank
    know that it waits for others (`beat.where`), which a call of torch's own does not show."""
    this = object()
    _WAITED[this] = messages
    try:
        for work in works:
            work.wait()
    finally:
        del _WAITED[this]


def unfinished() -> list[str]:
    """Describe the first operations that are not done, one line each."""
    found = dict.fromkeys((*_messages(), *_recorded()))
    return [f"{MARK} {what}" for what in list(found)[:_MOST_LINES]]


def card_waits() -> bool:
    """Tell if this process's card is in an operation of NCCL.

    A host that then synchronises with its card waits for other ranks, and no call of
    `torch.distributed` on its stack shows it.
    """
    over_nccl = dist.is_initialized() and dist.get_backend() == dist.Backend.NCCL
    return over_nccl and next(_recorded(), None) is not None


def report_on_signal(number: signal.Signals) -> None:
    """Print `unfinished` to standard error whenever this process gets a signal, also while its main
    thread is inside of a library.  Call it on the main thread, and before anything else that is to
    answer the signal too (`faulthandler.register` with `chain`)."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    # Python's own handler writes the signal's number to the pipe at once, whatever main does.
    signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)

    def report() -> None:
        while got := os.read(reading, 1):
            if got[0] == number:
                print("\n".join(unfinished()), file=sys.stderr, flush=True)

    threading.Thread(target=report, name="unfinished", daemon=True).start()


def _messages() -> Iterator[str]:
    # A list at once: waits of other threads begin and end meanwhile.
    for message in [message for messages in list(_WAITED.values()) for message in messages]:
        if message.group is not None:
            way = "to" if message.op is dist.isend else "from"
            where = f"{_named(message.group)} ({message.group.group_desc})"
            yield f"a message {way} rank {message.peer}, communicator {where}"


def _recorded() -> Iterator[str]:
    """Describe what torch's record has as unfinished, oldest first."""
    if not dist.is_initialized():
        return
    from torch._C import _distributed_c10d as c10d

    over_nccl = dist.get_backend() == dist.Backend.NCCL
    dump: Any = c10d._dump_nccl_trace_json if over_nccl else c10d._dump_fr_trace_json
    for entry in json.loads(dump()).get("entries", ()):
        if entry["retired"] or entry["state"] == "completed":
            continue
        name, use = entry["process_group"]
        group = dist.distributed_c10d._resolve_process_group(name)
        kind = entry["profiling_name"].rpartition(":")[2]
        use = "the whole job" if use == "default_pg" else use
        yield f"{kind}, communicator {_named(group)} ({use})"


def _named(group: dist.ProcessGroup) -> str:
    ranks = ", ".join(map(str, dist.get_process_group_ranks(group)))
    return f"{group.group_name} of ranks {ranks}"
