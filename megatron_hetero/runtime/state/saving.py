"""All-or-nothing saves of checkpoints; a failed save does not fail the job.

Megatron writes a checkpoint's data, then its tracker.  Here the data go into a folder of another
name; when all ranks are done, rank 0 adds the manifest and renames the folder; only then comes the
tracker, and only after it older checkpoints go.  A disk that is full or cannot be written fails the
save on all ranks alike: they agree before the first write and after the last one, and go on
training.  What Megatron does in between is its own, with `--async-save` too, where the digests are
taken by the process that writes.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args
from torch.distributed.checkpoint.api import CheckpointException

from megatron_hetero.errors import CheckpointError, HeteroError
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase
from megatron_hetero.runtime.state import folders
from megatron_hetero.runtime.state.by_rank_0 import failure_on_rank_0, words_of
from megatron_hetero.runtime.state.lock import FolderLock
from megatron_hetero.runtime.state.manifest import write_digests, write_manifest
from megatron_hetero.runtime.state.metadata_reading import named_files, read_metadata

Function = Callable[..., Any]


class _SaveFailedError(CheckpointError):
    """A synchronous save failed on all ranks, and nothing of it is left."""


class Saver:
    """Saves the checkpoints of one job.

    Args:
        plan_hash: of the plan that the job runs, for the manifests.
        keep: the number of checkpoints that are kept; None for all.
    """

    def __init__(self, plan_hash: str | None, keep: int | None) -> None:
        self._plan_hash, self._keep = plan_hash, keep
        self._is_first = True
        self._step = 0
        self.failure: str | None = None
        self._lock: FolderLock | None = None

    def lock(self, folder: str | None) -> None:
        """Keep other jobs from saving in `folder` until the end of this job (rank 0).

        Raises:
            CheckpointError: another job saves there, or nothing can be written there.
        """
        if folder is None:
            return
        self._lock = FolderLock(Path(folder))
        found = self._lock.take()
        if found is not None:
            _warn(found)

    def save_checkpoint(self, original: Function, step: int, *given: Any, **named: Any) -> None:
        """Run Megatron's `save_checkpoint`; leave nothing behind on a failure."""
        args = get_args()
        # Megatron asks for a checkpoint before it ends a job whose loss or gradient is no number,
        # also of a job that saves none.
        if args.save is None:
            if dist.get_rank() == 0:
                _warn(f"no checkpoint of step {step} is written: --save is not given")
            return
        # Other formats and non-persistent checkpoints are left to Megatron.
        if args.ckpt_format != "torch_dist" or named.get("non_persistent_ckpt"):
            original(step, *given, **named)
            return
        before = PROGRESS.current.phase
        name = "release" if named.get("release") else folders.step_folder(Path(), step).name
        final = Path(args.save) / name
        self._step = step
        PROGRESS.enter(Phase.SAVE)
        try:
            reason = failure_on_rank_0(partial(self._begin, final))
            if reason is None:
                original(step, *given, **named)
            else:
                self._fail(final, reason)
        except _SaveFailedError:
            # All ranks have reported the failure, and go on training.
            pass
        finally:
            PROGRESS.enter(before)

    def save(
        self, original: Function, state: Any, checkpoint_dir: str, *given: Any, **named: Any
    ) -> Any:
        """`dist_checkpointing.save`: into a working folder, which is published when it is whole.

        Returns:
            With `async_sharded_save` the request that Megatron finishes later; else None.
        """
        # Data go to a working folder of another name.
        final = Path(checkpoint_dir)
        working = folders.working_folder(final)
        is_async = named.pop("async_sharded_save", False)
        strategy = named.pop("async_strategy", "nvrx") if is_async else "mcore"
        named.pop("async_strategy", None)
        if dist.get_rank() == 0:
            working.mkdir(parents=True, exist_ok=True)
        # Always ask for the asynchronous form: it has hooks before and after the writing.
        request = original(
            state, working, *given, **named, async_sharded_save=True, async_strategy=strategy
        )
        # Guard the writing, then the steps that finish a save.
        save = _Save(self, final, working, self._step)
        write = request.async_fn
        request = request._replace(
            async_fn=None if write is None else partial(_write, write, str(working)),
            finalize_fns=save.steps(request.finalize_fns),
        )
        # Asynchronous: Megatron finishes later. Otherwise finish here, and tell a failure to
        # `save_checkpoint`.
        if is_async:
            return request
        request.execute_sync()
        if save.has_failed:
            raise _SaveFailedError
        return None

    def write_tracker(self, path: Path, text: str) -> None:
        """Megatron's tracker, in one step; then checkpoints that are no longer kept go (rank 0)."""
        try:
            PROGRESS.enter(Phase.TRACKER)
            folders.write_tracker(path, text)
            # A release has no step, and nothing goes after it.
            if self._keep is not None and text.isdecimal():
                for old in folders.outdated(path.parent, int(text), self._keep):
                    PROGRESS.enter(Phase.DELETE_OLD)
                    folders.remove(old)
        except OSError as error:
            _warn(
                f"the checkpoint of step {text} is complete, but {error.filename or path} could "
                f"not be written or removed ({error.strerror}). --ckpt-step {text} loads it."
            )

    def check_end(self) -> None:
        """The last save must have succeeded when the job ends.

        Raises:
            CheckpointError: what was trained since the last complete checkpoint is lost.
        """
        if self._lock is not None:
            self._lock.release()
        if self.failure is not None:
            raise CheckpointError(
                f"The job ended, but its last checkpoint was not saved: {self.failure}"
            )

    def _begin(self, final: Path) -> None:
        if self._is_first and final.parent.is_dir():
            folders.clear(final.parent)
        self._is_first = False
        folders.begin(folders.working_folder(final))
        final.mkdir(exist_ok=True)  # as Megatron does, but where a failure is told to all ranks

    def _publish(self, working: Path, final: Path, step: int) -> None:
        PROGRESS.enter(Phase.MANIFEST)
        # Every file that the metadata name must be visible here before the manifest vouches for it.
        for name in sorted(named_files(read_metadata(working / ".metadata"))):
            if not (working / name).is_file():
                raise CheckpointError(
                    f"{working / name}: written by a rank, but not to be seen from rank 0. --save "
                    "must be one folder that all machines share"
                )
        write_manifest(working, step, self._plan_hash, dist.get_world_size())
        PROGRESS.enter(Phase.RENAME)
        folders.publish(working, final)

    def _fail(self, final: Path, reason: str) -> None:
        """Report a failed save, and free the space of written files; on all ranks."""
        self.failure = reason
        if dist.get_rank() == 0:
            folders.abandon(folders.working_folder(final))
            done = folders.complete_steps(final.parent) if final.parent.is_dir() else []
            _warn(
                f"{final} was NOT saved: {reason}. The job goes on and tries again at the next "
                f"save; the newest complete checkpoint is "
                f"{f'of step {done[0]}' if done else 'none yet'}."
            )


class _Save:
    """A save from the planned data on, with the steps after all ranks have written."""

    def __init__(self, saver: Saver, final: Path, working: Path, step: int) -> None:
        self._saver, self._final, self._working, self._step = saver, final, working, step
        self._own_fault: str | None = None
        self.has_failed = False

    def steps(self, megatron: Sequence[Function]) -> _UntilFailure:
        """Megatron's steps (metadata, then its configuration), guarded, and then the publishing."""
        # The first step collects what the ranks wrote; in all others rank 0 writes, then all meet.
        first, *rest = megatron
        guarded = [partial(self._with_metadata, first)]
        guarded += [partial(self._behind_a_barrier, step) for step in rest]
        return _UntilFailure(self, [*guarded, self._publish])

    def _with_metadata(self, step: Function) -> None:
        """Collect what ranks wrote; rank 0 writes `.metadata` before it tells whether all is well.

        Follows `state_dict_saver.save_state_dict_async_finalize`, where rank 0 alone can meet a
        full disk while the others wait for its word.
        """
        try:
            step()
        except CheckpointException as error:
            self._fail("; ".join(str(cause) for cause, _ in error.failures.values()))
        except OSError as error:
            flag = torch.ones(1, dtype=torch.int, device=torch.cuda.current_device())
            dist.broadcast(flag, src=0)
            self._fail(words_of(error))

    def _behind_a_barrier(self, step: Function) -> None:
        """Run a step in which rank 0 writes, then meet all ranks."""
        try:
            step()
        except OSError as error:
            self._own_fault = words_of(error)
            dist.barrier()

    def _publish(self) -> None:
        def act() -> None:
            # A step before failed on rank 0 alone: here all ranks hear of it.
            if self._own_fault is not None:
                raise CheckpointError(self._own_fault)
            self._saver._publish(self._working, self._final, self._step)

        reason = failure_on_rank_0(act)
        if reason is not None:
            self._fail(reason)
        else:
            self._saver.failure = None

    def _fail(self, reason: str) -> None:
        self.has_failed = True
        self._saver._fail(self._final, reason or "another rank could not write its part")


class _UntilFailure(list[Function]):
    """Steps of a save, cut off once the save has failed, though Megatron adds more steps."""

    def __init__(self, save: _Save, steps: Sequence[Function]) -> None:
        super().__init__(steps)
        self._save = save

    def __iter__(self) -> Iterator[Function]:
        for step in super().__iter__():
            if self._save.has_failed:
                return
            yield step


def _write(write: Function, folder: str, rank: int, buckets: Any, results: Any) -> None:
    """Write a rank's data as Megatron does, then their digests; in the process that writes.

    A failure travels to the other ranks with the results, as those of Megatron's own writer do.
    """
    answers: queue.Queue[Any] = queue.Queue()
    try:
        PROGRESS.enter(Phase.SAVE_DATA)
        # The writer answers into a queue of ours, so that digests come before any word of success.
        write(rank, buckets, answers)
        answer = answers.get_nowait()
        if not isinstance(answer, Exception):
            write_digests(Path(folder), rank, [name for _, name, _ in buckets])
    except (OSError, HeteroError) as error:
        answer = RuntimeError(str(error))
    results.put(answer)


def _warn(text: str) -> None:
    print(f"> megatron-hetero: WARNING: {text}", flush=True)
