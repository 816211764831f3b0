"""The checkpoint to go on from: the newest whole one, alike on all ranks, or a refusal by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import global_vars

from megatron_hetero.errors import CheckpointError
from megatron_hetero.runtime.state import choosing, folders
from megatron_hetero.runtime.state.choosing import load_checkpoint, sound_step
from tests.runtime.state.test_manifest import FILES, written
from tests.runtime.state.test_metadata_reading import metadata_bytes
from tests.runtime.toy_model import in_world

WORLD = "tp1:1 @1 | tp1:1 @1"


def saved(folder: Path, *steps: int) -> Path:
    """Whole checkpoints of these steps; the tracker names the last of them."""
    for step in steps:
        path = written(folders.step_folder(folder, step), step, metadata_bytes())
        assert path.is_dir()
    folders.write_tracker(folder / folders.TRACKER, str(steps[-1]))
    return folder


def damage(folder: Path, step: int, name: str = "__1_0.distcp") -> None:
    (folders.step_folder(folder, step) / name).write_bytes(b"other")


def chosen(folder: Path, asked: int | None = None, may_fall_back: bool = True) -> tuple[Any, str]:
    """The step on this rank, or the refusal; and what was printed."""
    with redirect_stdout(StringIO()) as printed:
        try:
            found: Any = sound_step(folder, asked, may_fall_back)
        except CheckpointError as error:
            found = str(error)
    return found, printed.getvalue()


def everywhere(folder: Path, check: Callable[[Any, str, int], None]) -> None:
    def act(rank: int) -> None:
        check(*chosen(folder), rank)

    in_world(WORLD, act, folder / "run")


def test_the_trackers_checkpoint_is_taken_where_it_is_whole(tmp_path: Path) -> None:
    saved(tmp_path, 10, 30, 20)

    def check(found: Any, said: str, rank: int) -> None:
        assert found is None
        wanted = "complete checkpoints of later steps are there: 30"
        assert (wanted in said) == (rank == 0)

    everywhere(tmp_path, check)


def test_a_damaged_one_gives_way_to_the_one_before(tmp_path: Path) -> None:
    """The second rank's file is damaged, and the first rank says so."""
    saved(tmp_path, 10, 20, 30, 40)
    damage(tmp_path, 40)
    damage(tmp_path, 30, ".metadata")

    def check(found: Any, said: str, rank: int) -> None:
        assert found == 20
        if rank == 0:
            assert "iter_0000040 is refused" in said and "__1_0.distcp" in said
            assert "iter_0000020 is whole and is loaded instead" in said
        else:
            assert said == ""

    everywhere(tmp_path, check)


def test_every_file_is_looked_at_by_one_of_the_ranks(tmp_path: Path) -> None:
    for name in FILES:
        saved(tmp_path / name, 10, 20)
        with (folders.step_folder(tmp_path / name, 20) / name).open("ab") as end:
            end.write(b"0")

    def check(rank: int) -> None:
        for name in FILES:
            found, said = chosen(tmp_path / name)
            assert found == 10
            assert (name in said) == (rank == 0)

    in_world(WORLD, check, tmp_path / "run")


def test_what_a_user_names_is_loaded_or_nothing(tmp_path: Path) -> None:
    """Nor does an older one do where something of the first is used already."""
    saved(tmp_path, 20, 40)
    damage(tmp_path, 40)

    def check(rank: int) -> None:
        for asked in (None, 40):
            found, _ = chosen(tmp_path, asked, may_fall_back=False)
            assert "no checkpoint in it can be loaded" in found
            assert "iter_0000040 is refused" in found and "--ckpt-step" in found
            assert "iter_0000020" not in found

    in_world(WORLD, check, tmp_path / "run")


def test_a_broken_tracker_is_written_anew(tmp_path: Path) -> None:
    saved(tmp_path, 10, 20)
    (tmp_path / folders.TRACKER).write_bytes(b"\0\0")

    def check(found: Any, said: str, rank: int) -> None:
        assert found is None
        assert ("the newest complete one is 20" in said) == (rank == 0)
        if rank == 0:
            assert (tmp_path / folders.TRACKER).read_text() == "20"

    everywhere(tmp_path, check)


def test_a_lost_tracker_is_written_anew(tmp_path: Path) -> None:
    """Megatron would begin anew, and save over what was trained."""
    saved(tmp_path, 10, 20)
    (tmp_path / folders.TRACKER).unlink()
    assert choosing.has_checkpoint(str(tmp_path))

    def check(found: Any, said: str, rank: int) -> None:
        assert found is None
        assert ("is missing; the newest complete one is 20" in said) == (rank == 0)
        if rank == 0:
            assert (tmp_path / folders.TRACKER).read_text() == "20"

    everywhere(tmp_path, check)


def test_a_folder_without_any_checkpoint_has_none(tmp_path: Path) -> None:
    (tmp_path / "iter_0000010").mkdir()  # not known to be whole
    for folder in (None, str(tmp_path), str(tmp_path / "nothing")):
        assert not choosing.has_checkpoint(folder)


def test_a_lost_tracker_counts_before_a_pretrained_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = saved(tmp_path / "own", 20)
    (own / folders.TRACKER).unlink()
    args = SimpleNamespace(
        load=str(own), ckpt_format="torch_dist", ckpt_step=None,
        use_checkpoint_args=False, pretrained_checkpoint=str(saved(tmp_path / "other", 10)),
    )  # fmt: skip
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    looked_at = []
    monkeypatch.setattr(choosing, "sound_step", lambda folder, *rest: looked_at.append(folder))
    load_checkpoint(lambda model, load_arg: None, "m")
    assert looked_at == [own]


def test_without_any_whole_one_all_ranks_stop(tmp_path: Path) -> None:
    (tmp_path / folders.TRACKER).write_text("half")

    def check(found: Any, said: str, rank: int) -> None:
        says = "Write the step of the checkpoint" if rank == 0 else "rank 0 cannot choose"
        assert says in found

    everywhere(tmp_path, check)


def test_stock_checkpoints_are_taken_unchecked_and_it_is_said(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    stock = folders.step_folder(tmp_path, 20)
    stock.mkdir()
    (stock / "common.pt").write_bytes(b"")
    folders.write_tracker(tmp_path / folders.TRACKER, "20")

    def check(found: Any, said: str, rank: int) -> None:
        assert found is None
        assert ("has no manifest" in said) == (rank == 0)

    everywhere(tmp_path, check)


def test_megatron_is_told_the_step_for_the_time_of_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = SimpleNamespace(
        load=str(saved(tmp_path, 10)), ckpt_format="torch_dist", ckpt_step=None,
        use_checkpoint_args=False, pretrained_checkpoint=None,
    )  # fmt: skip
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setattr(choosing, "sound_step", lambda folder, asked, may_fall_back: 7)
    seen = []

    def original(model: Any, *given: Any, load_arg: str) -> str:
        seen.append((model, given, load_arg, args.ckpt_step))
        return "loaded"

    assert load_checkpoint(original, "m", 1) == "loaded"
    assert seen == [("m", (1,), "load", 7)] and args.ckpt_step is None
    args.ckpt_format = "torch"  # not ours to check
    load_checkpoint(original, "m", 1)
    assert seen[1] == ("m", (1,), "load", None)


def test_a_pretrained_checkpoint_is_checked_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretrained = saved(tmp_path, 10)
    args = SimpleNamespace(
        load=str(tmp_path / "nothing"), ckpt_format="torch_dist", ckpt_step=None,
        use_checkpoint_args=False, pretrained_checkpoint=str(pretrained),
    )  # fmt: skip
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    looked_at = []
    monkeypatch.setattr(choosing, "sound_step", lambda folder, *rest: looked_at.append(folder))
    load_checkpoint(lambda model, load_arg: None, "m")
    assert looked_at == [pretrained]
    # Once the job has saved something of its own, that counts.
    args.load = str(saved(tmp_path / "own", 20))
    load_checkpoint(lambda model, load_arg: None, "m")
    assert looked_at[1:] == [Path(args.load)]
