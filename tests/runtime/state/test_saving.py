"""Saves of two ranks: whole or not there, and the job goes on where a disk refuses."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.training import global_vars

from megatron_hetero.errors import CheckpointError
from megatron_hetero.runtime.faults.progress import PROGRESS
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.state import folders
from megatron_hetero.runtime.state.manifest import read_manifest
from megatron_hetero.runtime.state.saving import Saver
from tests.runtime.state.test_manifest import all_faults
from tests.runtime.toy_model import in_world

WORLD = "tp1:1 @1 | tp1:1 @1"
PLAN = "c" * 64


def weights(rank: int, step: int) -> torch.Tensor:
    return torch.arange(4.0) + 10 * rank + 100 * step


def save(saver: Saver, folder: Path, step: int) -> None:
    """As Megatron saves: its data, and on rank 0 the tracker of what was saved."""
    rank = dist.get_rank()

    def original(step: int) -> None:
        state = {"w": ShardedTensor.from_rank_offsets("w", weights(rank, step), (0, rank, 2))}
        path = folders.step_folder(folder, step)
        saver.save(dist_checkpointing.save, state, str(path))
        dist.barrier()
        if rank == 0:
            saver.write_tracker(folder / folders.TRACKER, str(step))

    saver.save_checkpoint(original, step)


def loaded(folder: Path, step: int) -> torch.Tensor:
    rank = dist.get_rank()
    state = {"w": ShardedTensor.from_rank_offsets("w", torch.zeros(4), (0, rank, 2))}
    found = dist_checkpointing.load(state, str(folders.step_folder(folder, step)))
    return found["w"]  # type: ignore[no-any-return]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def with_saver(tmp_path: Path, keep: int | None, act: Callable[[Saver, Path, int], None]) -> None:
    folder = tmp_path / "saved"

    def check(rank: int) -> None:
        save_without_a_server()
        global_vars._GLOBAL_ARGS = SimpleNamespace(ckpt_format="torch_dist", save=str(folder))
        act(Saver(PLAN, keep), folder, rank)

    in_world(WORLD, check, tmp_path / "run")


def test_a_save_is_whole_and_the_newest_are_kept(tmp_path: Path) -> None:
    def act(saver: Saver, folder: Path, rank: int) -> None:
        before = PROGRESS.current.phase
        if rank == 0:  # of a job that ended in a save
            (folder / ".saving-iter_0000002").mkdir(parents=True)
        dist.barrier()
        for step in (2, 4, 6):
            save(saver, folder, step)
            dist.barrier()
        assert PROGRESS.current.phase == before
        assert names(folder) == ["iter_0000004", "iter_0000006", folders.TRACKER]
        assert (folder / folders.TRACKER).read_text() == "6"
        for step in (4, 6):
            path = folders.step_folder(folder, step)
            assert all_faults(path) == []
            manifest = read_manifest(path)
            assert (manifest.step, manifest.plan, manifest.num_ranks) == (step, PLAN, 2)
            assert torch.equal(loaded(folder, step), weights(rank, step))
        saver.check_end()

    with_saver(tmp_path, 2, act)


def test_a_disk_that_refuses_fails_the_save_on_all_ranks_and_not_the_job(tmp_path: Path) -> None:
    """At the begin, where a file stands in the folder's place; then at the end, where rank 0 does
    not see what the other has written; then all is well again."""

    def act(saver: Saver, folder: Path, rank: int) -> None:
        save(saver, folder, 2)
        blocked = folder / ".saving-iter_0000004"
        if rank == 0:
            blocked.write_text("")
        dist.barrier()
        save(saver, folder, 4)
        assert saver.failure is not None
        with pytest.raises(CheckpointError, match="its last checkpoint was not saved"):
            saver.check_end()
        if rank == 0:
            blocked.unlink(missing_ok=True)
            assert "iter_0000004" in saver.failure
        dist.barrier()
        publish = saver._publish

        def unseen(working: Path, final: Path, step: int) -> None:
            os.unlink(working / "__1_0.distcp")
            publish(working, final, step)

        saver._publish = unseen  # type: ignore[method-assign]
        save(saver, folder, 6)
        assert saver.failure is not None
        if rank == 0:
            assert "--save must be one folder that all machines share" in saver.failure
        saver._publish = publish  # type: ignore[method-assign]
        dist.barrier()
        assert folders.complete_steps(folder) == [2]
        assert (folder / folders.TRACKER).read_text() == "2"
        save(saver, folder, 8)
        assert saver.failure is None
        saver.check_end()
        assert folders.complete_steps(folder) == [8, 2]
        assert torch.equal(loaded(folder, 8), weights(rank, 8))

    with_saver(tmp_path, None, act)


def test_a_tracker_that_cannot_be_written_is_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Saver(PLAN, 1).write_tracker(tmp_path / "none" / folders.TRACKER, "4")
    said = capsys.readouterr().out
    assert "the checkpoint of step 4 is complete" in said and "--ckpt-step 4 loads it" in said


def test_other_formats_are_megatrons_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path)
    args = SimpleNamespace(ckpt_format="torch", save=str(tmp_path))
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    seen: list[Any] = []
    Saver(PLAN, 1).save_checkpoint(lambda *given, **named: seen.append((given, named)), 3, 4, a=5)
    assert seen == [((3, 4), {"a": 5})] and not tmp_path.exists()


def test_a_job_without_save_ends_as_megatron_ends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Megatron asks for a checkpoint when a loss is NaN, and then leaves with a code of its own."""
    args = SimpleNamespace(ckpt_format="torch_dist", save=None)
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    seen: list[Any] = []
    Saver(PLAN, 1).save_checkpoint(lambda *given, **named: seen.append(given), 3, 4)
    assert seen == []
    assert "no checkpoint of step 3 is written: --save is not given" in capsys.readouterr().out
