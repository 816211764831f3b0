"""A job of one machine meets through a file of its own and keeps to loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.runtime.job.one_machine import store_file
from megatron_hetero.runtime.job.world import World

STARTED = {"TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "4"}


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*STARTED, "MEGATRON_HETERO_STORE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # so that it is put back, whoever sets it
        monkeypatch.delenv(name)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)


def start(monkeypatch: pytest.MonkeyPatch, **changes: str) -> str | None:
    for name, value in (STARTED | changes).items():
        monkeypatch.setenv(name, value)
    return store_file()


def test_ranks_of_one_start_share_a_file_that_no_other_start_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    first = start(monkeypatch)
    assert first is not None and first == start(monkeypatch)
    assert start(monkeypatch, TORCHELASTIC_RESTART_COUNT="1") not in (None, first)
    folder = Path(first).parent
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "eth7", "the user's choice stands"
    assert start(monkeypatch) == first
    assert World.from_environment().store_path == first


def test_several_machines_meet_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert start(monkeypatch, WORLD_SIZE="8") is None
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT")
    assert store_file() is None


def test_a_folder_that_others_can_write_to_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / f"megatron-hetero-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(EnvironmentMismatchError, match="others can write"):
        start(monkeypatch)
    folder.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EnvironmentMismatchError, match="others can write"):
        start(monkeypatch)
