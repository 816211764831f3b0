"""One job at a time saves in a folder; a lock that was left behind holds nobody up for long."""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import CheckpointError
from megatron_hetero.runtime.state import lock
from megatron_hetero.runtime.state.lock import NAME, FolderLock

Read = Callable[[FolderLock], dict[str, Any] | None]


def held_by_a_child(folder: Path) -> int:
    """Fork a process that takes the lock and keeps it; return its number."""
    ready, told = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            FolderLock(folder).take()
            os.write(told, b"1")
            time.sleep(60)
        finally:
            os._exit(0)
    assert os.read(ready, 1) == b"1"
    return pid


def test_two_jobs_of_a_machine_and_one_that_died(tmp_path: Path) -> None:
    pid = held_by_a_child(tmp_path / "saved")
    said = rf"another job saves there, process {pid} on \S+, since 20\d\d-.*name another folder"
    with pytest.raises(CheckpointError, match=said):
        FolderLock(tmp_path / "saved").take()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    own = FolderLock(tmp_path / "saved")
    assert f"the lock of process {pid}" in (own.take() or "")
    own.release()
    assert not (tmp_path / "saved" / NAME).exists()
    assert FolderLock(tmp_path / "saved").take() is None


def elsewhere(folder: Path) -> None:
    """Let a lock be that of another machine whose clock is an hour ahead."""
    data = json.loads((folder / NAME).read_text())
    data |= {"machine": "another", "host": "far", "since": "2031-01-01T00:00:00+00:00"}
    (folder / NAME).write_text(json.dumps(data))


def test_a_holder_on_another_machine_is_known_by_its_beats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_SILENCE_S", 1.0)
    FolderLock(tmp_path).take()
    elsewhere(tmp_path)
    # Nothing beats there: the host is gone.
    own = FolderLock(tmp_path)
    assert "on far, since 2031" in (own.take() or "")
    own.release()
    monkeypatch.setattr(lock, "_BEAT_S", 0.2)
    pid = held_by_a_child(tmp_path)
    data = json.loads((tmp_path / NAME).read_text())
    monkeypatch.setattr(FolderLock, "_holder", _seen_from_afar(FolderLock._holder))
    with pytest.raises(CheckpointError, match=f"another job saves there, process {data['pid']}"):
        FolderLock(tmp_path).take()
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert "has ended" in (FolderLock(tmp_path).take() or "")


def _seen_from_afar(read: Read) -> Read:
    def seen(self: FolderLock) -> dict[str, Any] | None:
        found = read(self)
        return found and {**found, "machine": "another"}

    return seen


@pytest.mark.parametrize(
    ("number", "refuses"), [(errno.EROFS, True), (errno.EACCES, True), (errno.ENOSPC, False)]
)
def test_a_folder_that_cannot_be_written(
    number: int, refuses: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_self: FolderLock, _beat: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(FolderLock, "_write", refuse)
    if refuses:
        with pytest.raises(CheckpointError, match="nothing can be written there"):
            FolderLock(tmp_path).take()
    else:
        assert "No space left" in (FolderLock(tmp_path).take() or "")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}'])
def test_half_a_lock_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(text)
    assert FolderLock(tmp_path).take() is None
