"""A job of one machine meets through a file and talks over the loopback interface alone.

Torch's own rendezvous listens on all interfaces, also where it is told 127.0.0.1, and gloo and NCCL
take the interface of the machine's name.  None of them knows authentication.
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from megatron_hetero.errors import EnvironmentMismatchError

LOCAL_STORE = "MEGATRON_HETERO_STORE"
"""Variable with the path of the file through which the ranks of a local launch meet."""
LOOPBACK = "lo"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_START_TIME = 19
"""Field of /proc/PID/stat, counted behind the name of the program."""


def store_file() -> str | None:
    """Return the file through which the ranks of this machine meet; keep them on loopback.

    The name is made of the launcher's process and its restarts, so that all ranks of a start have
    the same and no two starts do.  An interface that the environment names already stands.

    Returns:
        None for a job of several machines, or one that `torchrun` did not start.
    Raises:
        EnvironmentMismatchError: the folder of such files is not the user's own.
    """
    given = os.environ
    # `torchrun` sets this variable for every process that it starts.
    if "TORCHELASTIC_RESTART_COUNT" not in given:
        return None
    if given.get("LOCAL_WORLD_SIZE") != given.get("WORLD_SIZE"):
        return None
    if LOOPBACK in [name for _, name in socket.if_nameindex()]:
        for variable in _INTERFACES:
            given.setdefault(variable, LOOPBACK)
    # A process number comes again some day, but not with the same start.
    launcher = os.getppid()
    started = Path(f"/proc/{launcher}/stat").read_text().rpartition(")")[2].split()[_START_TIME]
    name = f"{launcher}-{started}-{given['TORCHELASTIC_RESTART_COUNT']}"
    return str(_own_folder() / name)


def _own_folder() -> Path:
    folder = Path(tempfile.gettempdir()) / f"megatron-hetero-{os.getuid()}"
    # In a shared folder somebody else may have made this name first.
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if folder.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise EnvironmentMismatchError(
            f"{folder}: the ranks would meet there, but others can write to it. Remove it, or set "
            "TMPDIR to a folder of your own."
        )
    return folder
