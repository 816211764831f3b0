"""What a rank is called when it fails: its machine, its card and its place in the plan."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """A rank for people: `what` says its GPU, replica and stage; `pid` is its process.

    `machine` is equal where processes see one another by number, whatever `host` is called;
    `started` tells the process from a later one of the same number.
    """

    rank: int
    host: str
    machine: str
    what: str
    pid: int
    started: str

    @staticmethod
    def here(rank: int, what: str) -> Place:
        """The place of this process."""
        # One boot and one namespace of processes: there a number means one process.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        started = _life(os.getpid())[1]
        return Place(rank, socket.gethostname(), machine, what, os.getpid(), started)

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.what})"

    def is_alive(self) -> bool:
        """Whether the process runs, on this machine; one that waits to be collected does not."""
        state, started = _life(self.pid)
        return started == self.started and state not in ("", "Z", "X", "x")

    def is_stopped(self) -> bool:
        """Tell if the process of this machine is stopped, by SIGSTOP or its kind."""
        return _life(self.pid) == ("T", self.started)

    def text(self) -> str:
        """The form in the store."""
        return json.dumps(asdict(self))

    @staticmethod
    def of(text: str) -> Place:
        """A place from the store."""
        return Place(**json.loads(text))


def _life(pid: int) -> tuple[str, str]:
    """(state, start time) of a process as Linux says them; empty where there is none."""
    try:
        # A program's name may have spaces and parentheses, so count from behind the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    # Fields 3 and 22 of proc(5); the start time tells a number's later owner apart.
    return fields[0], fields[19]
