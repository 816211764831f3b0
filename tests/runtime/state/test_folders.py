"""Folders of checkpoints: whatever instant a job ends at, each name holds a whole one or none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.runtime.state import folders
from tests.runtime.state.test_manifest import all_faults, written


def test_a_newer_checkpoint_takes_the_place_of_one_of_the_same_step(tmp_path: Path) -> None:
    final = written(tmp_path / "iter_0000007")
    (final / "__0_0.distcp").write_bytes(b"damaged")
    working = written(folders.working_folder(final))
    folders.publish(working, final)
    assert all_faults(final) == []
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"]


def test_a_replaced_checkpoint_comes_back_if_its_successor_did_not(tmp_path: Path) -> None:
    """Ended between the two renames of `publish`."""
    final = written(tmp_path / "iter_0000007")
    final.rename(tmp_path / ".replaced-iter_0000007")
    written(folders.working_folder(final))
    folders.clear(tmp_path)
    assert all_faults(final) == []
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000007"]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (10, 20, 30, 40):
        written(folders.step_folder(tmp_path, step), step)
    (tmp_path / "iter_0000005").mkdir()  # stock Megatron's, or empty: not ours to delete
    for old in folders.outdated(tmp_path, 30, 2):
        folders.remove(old)
    assert folders.complete_steps(tmp_path) == [40, 30, 20]
    assert (tmp_path / "iter_0000005").is_dir()


class EndedError(Exception):
    """The job ends here."""


class Ending:
    """Acts of a save, of which so many are done before the job ends."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.most = 0

    def watched(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            if len(self.acts) == self.most:
                raise EndedError
            self.acts.append(act.__name__)
            return act(*given)

        return call


@pytest.mark.parametrize("had_one", [False, True], ids=["first", "again"])
def test_a_job_that_ends_at_any_act_leaves_a_whole_checkpoint_or_none(
    had_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each rename and each sync of a save in turn; the next job then clears what is left."""
    final, ending = tmp_path / "iter_0000007", Ending()
    acts = ["sync", *["rename"] * (1 + had_one), "sync"]
    for most in range(len(acts) + 1):
        if final.exists():
            folders.remove(final)
        if had_one:
            written(final)
        working = written(folders.working_folder(final))
        ending.acts, ending.most = [], most
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", ending.watched(Path.rename))
            patch.setattr(folders, "sync", ending.watched(folders.sync))
            with nullcontext() if most == len(acts) else pytest.raises(EndedError):
                folders.publish(working, final)
        assert ending.acts == acts[:most]
        folders.clear(tmp_path)
        is_there = had_one or most > 1
        assert [path.name for path in tmp_path.iterdir()] == [final.name] * is_there
        assert not is_there or all_faults(final) == []


def test_a_working_folder_begins_empty(tmp_path: Path) -> None:
    working = folders.working_folder(tmp_path / "deep" / "iter_0000007")
    folders.begin(working)
    (working / "half").write_bytes(b"1")
    folders.begin(working)
    assert working.is_dir() and list(working.iterdir()) == []
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="file"):
        folders.begin(tmp_path / "file" / ".saving-iter_0000007")


def test_only_megatrons_names_with_a_manifest_count(tmp_path: Path) -> None:
    for name in ("iter_0000020", "iter_12345678", ".saving-iter_0000030", "iter_30", "release"):
        written(tmp_path / name)
    (tmp_path / "iter_0000040").mkdir()
    assert folders.complete_steps(tmp_path) == [12345678, 20]
    assert folders.step_folder(tmp_path, 20).name == "iter_0000020"
    assert folders.step_folder(tmp_path, 12345678).name == "iter_12345678"


def test_the_tracker_is_replaced_in_one_step(tmp_path: Path) -> None:
    tracker = tmp_path / folders.TRACKER
    for text in ("20", "40", "release"):
        folders.write_tracker(tracker, text)
        assert tracker.read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == [folders.TRACKER]
