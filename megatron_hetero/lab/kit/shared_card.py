"""NVIDIA's Multi-Process Service (MPS) for ranks that share a card.

Without MPS the kernels of two processes on one card run in turns, by time slices, and each rank
that waits in a NCCL kernel takes its slice.  With MPS the kernels run side by side.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

CONTROL = "nvidia-cuda-mps-control"
_LIMIT_S = 30.0
_FOLDERS = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")


@contextmanager
def side_by_side(num_gpus: int) -> Iterator[str]:
    """Run the service while the ranks of a `with` block share cards; yield how they share.

    A service that the user has started stays as it is.  Where there is none to be had, or where the
    service refuses, ranks share cards by time slices, which is slower and trains the same.

    Args:
        num_gpus: GPUs of this machine; without any, nothing is started.
    """
    control = shutil.which(CONTROL)
    if num_gpus == 0:
        yield "processes on the CPU"
    elif any(name in os.environ for name in _FOLDERS):
        yield "the MPS that runs here"
    elif control is None:
        yield f"time slices: {CONTROL} is not installed"
    else:
        with _service(control) as how:
            yield how


@contextmanager
def apart() -> Iterator[None]:
    """Let the ranks of a `with` block share cards without MPS, by time slices: under MPS the death
    of a rank ends the kernels of all others, on a card of their own too."""
    kept = {name: os.environ.pop(name) for name in _FOLDERS if name in os.environ}
    try:
        yield
    finally:
        os.environ |= kept


@contextmanager
def _service(control: str) -> Iterator[str]:
    # A short path: the service makes sockets in the folder.
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= dict.fromkeys(_FOLDERS, folder)
        try:
            # `-d` starts a daemon, which takes the folders from the environment.
            started = _run([control, "-d"])
            if started:
                # CUDA would look for the service at these folders.
                for name in _FOLDERS:
                    del os.environ[name]
                yield f"time slices: MPS refused ({started})"
                return
            try:
                yield "MPS"
            finally:
                _run([control], "quit\n")
        finally:
            for name in _FOLDERS:
                os.environ.pop(name, None)


def _run(command: list[str], text: str = "") -> str:
    """Run the control program; return what it said if it failed, or an empty string."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if done.returncode == 0:
        return ""
    said = (done.stderr or done.stdout).strip().splitlines()
    return said[-1] if said else f"exit {done.returncode}"
