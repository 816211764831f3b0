"""The lock of a folder of checkpoints: one job at a time saves there.

Two jobs in one folder would remove each other's unfinished checkpoints and move each other's
tracker.  The lock says who holds it: host, process and time.  A holder on this machine is asked for
by its process; one on another machine by its beats, which it writes into the file as long as it
lives.  Clocks of machines are not compared.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from megatron_hetero.errors import CheckpointError, FileFormatError
from megatron_hetero.files import read_json
from megatron_hetero.runtime.faults.place import Place

NAME = ".megatron-hetero-lock.json"
_BEAT_S = 5.0
_SILENCE_S = 20.0
"""A holder on another machine that does not beat for so long has ended."""
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class FolderLock:
    """The lock of one folder, held by this process."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._nonce = secrets.token_hex(8)
        self._place = Place.here(0, "")
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._is_over = threading.Event()
        self._beats = threading.Thread(target=self._beat, name="lock of --save", daemon=True)

    def take(self) -> str | None:
        """Take the lock, and hold it until `release` or the end of the process.

        Returns:
            A line about a lock that a job left behind, if there was one; or about a disk on which
            the lock cannot be written now.
        Raises:
            CheckpointError: another job holds it, or nothing can ever be written there.
        """
        found = None
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            holder = self._holder()
            if holder is not None:
                self._check_ended(holder)
                found = f"{self._path.parent}: the lock of {_who(holder)}, which has ended, is gone"
            self._write(0)
        except OSError as error:
            if error.errno in _UNWRITABLE:
                raise CheckpointError(
                    f"--save {self._path.parent}: nothing can be written there "
                    f"({error.strerror}). Name another folder, or leave --save out."
                ) from error
            return f"--save {self._path.parent}: no lock could be written ({error.strerror})"
        self._check_first()
        self._beats.start()
        return found

    def release(self) -> None:
        """Let others save there."""
        self._is_over.set()
        if self._beats.is_alive():
            self._beats.join(timeout=_BEAT_S)
        holder = self._holder()
        if holder is not None and holder.get("nonce") == self._nonce:
            self._path.unlink(missing_ok=True)

    def _check_ended(self, holder: dict[str, Any]) -> None:
        """Wait for a sign of life of the holder.

        Raises:
            CheckpointError: it lives.
        """
        # A process of this machine can be asked; of any other only beats tell.
        if holder["machine"] == self._place.machine:
            process = Place(
                0, holder["host"], holder["machine"], "", holder["pid"], holder["started"]
            )
            # A lock with the number of this very process keeps nobody else away.
            is_alive = process.pid != self._place.pid and process.is_alive()
        else:
            print(
                f"> megatron-hetero: {self._path.parent} is locked by {_who(holder)}; looking for "
                f"{_SILENCE_S:.0f} s whether it lives",
                flush=True,
            )
            is_alive = self._beats_within(holder, _SILENCE_S)
        if is_alive:
            raise CheckpointError(
                f"--save {self._path.parent}: another job saves there, {_who(holder)}. Two jobs in "
                "one folder would remove each other's checkpoints: end that job, or name another "
                "folder."
            )

    def _beats_within(self, holder: dict[str, Any], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(min(0.5, seconds / 4))
            now = self._holder()
            if now is None:
                return False
            if (now.get("nonce"), now.get("beat")) != (holder.get("nonce"), holder.get("beat")):
                return True
        return False

    def _check_first(self) -> None:
        """Check the lock after a moment: of two jobs started together the later writer has the
        lock."""
        time.sleep(0.05)
        holder = self._holder()
        if holder is not None and holder.get("nonce") != self._nonce:
            raise CheckpointError(
                f"--save {self._path.parent}: another job has just begun to save there, "
                f"{_who(holder)}. Name another folder."
            )

    def _holder(self) -> dict[str, Any] | None:
        """Return what the lock says; None if there is none, or nobody can have written it."""
        try:
            found = read_json(self._path).data
        except FileFormatError:
            return None
        kinds = {"host": str, "machine": str, "pid": int, "started": str, "since": str}
        is_lock = isinstance(found, dict) and all(
            isinstance(found.get(key), kind) for key, kind in kinds.items()
        )
        return found if is_lock else None

    def _write(self, beat: int) -> None:
        place = self._place
        data = {
            "host": place.host, "machine": place.machine, "pid": place.pid,
            "started": place.started, "since": self._since, "nonce": self._nonce, "beat": beat,
        }  # fmt: skip
        # Written beside and renamed: no reader finds half a lock.
        temporary = self._path.with_name(f"{NAME}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(data), encoding="utf-8")
        temporary.replace(self._path)

    def _beat(self) -> None:
        beat = 0
        while not self._is_over.wait(_BEAT_S):
            beat += 1
            holder = self._holder()
            if holder is None or holder.get("nonce") != self._nonce:
                return  # the folder was removed, or a job of another machine took this one for dead
            try:
                self._write(beat)
            except OSError:
                continue  # a full disk: the saves say so


def _who(holder: dict[str, Any]) -> str:
    return f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
