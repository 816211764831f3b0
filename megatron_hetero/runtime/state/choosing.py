"""The checkpoint that a job goes on from: checked whole before anything of it is read.

All ranks check, each its part of the files.  What is damaged is refused by name, and where the
tracker chose it, and not the user, the newest complete one before it takes its place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.training import get_args
from megatron.training.checkpointing import checkpoint_exists
from torch.distributed.checkpoint.api import CheckpointException

from megatron_hetero.errors import CheckpointError, HeteroError
from megatron_hetero.runtime.parallel.texts import gather_texts
from megatron_hetero.runtime.state import folders
from megatron_hetero.runtime.state.manifest import (
    faults_of,
    has_manifest,
    read_manifest,
    strangers_in,
)
from megatron_hetero.runtime.state.metadata_reading import read_metadata

_NONE, _RELEASE = -1, -2


@dataclass(frozen=True)
class UnlikeRanks:
    """A job whose ranks have stages of unlike width: the hash of its plan, and rank 0's
    (tensor-parallel, pipeline) sizes."""

    plan_hash: str
    sizes_of_rank_0: tuple[int, int]


def load_checkpoint(
    original: Callable[..., Any],
    model: Any,
    *given: Any,
    load_arg: str = "load",
    ranks: UnlikeRanks | None = None,
    **named: Any,
) -> Any:
    """Megatron's `load_checkpoint` of a checkpoint that is whole.

    Args:
        original: Megatron's function.
        model: as Megatron's.
        given: as Megatron's.
        load_arg: as Megatron's.
        ranks: what Megatron cannot know of this job's ranks; None for a job of stock Megatron.
        named: as Megatron's.
    Raises:
        CheckpointError: no such checkpoint is there; names every fault of every file.
    """
    args = get_args()
    folder = getattr(args, load_arg)
    is_there = has_checkpoint(folder)
    # Megatron begins from another folder where this one has nothing yet.
    if not is_there and args.pretrained_checkpoint is not None:
        folder = args.pretrained_checkpoint
        is_there = has_checkpoint(folder)
    # Megatron by itself handles other formats, and says that a checkpoint is missing.
    if args.ckpt_format != "torch_dist" or not (is_there or (folder and args.ckpt_step)):
        return original(model, *given, load_arg=load_arg, **named)
    step = sound_step(Path(folder), args.ckpt_step, _may_fall_back(args))
    sizes = None if ranks is None else _sizes_for_megatron(Path(folder), step, ranks)
    with _step_for_megatron(args, step), _alike_on_all_ranks(args, sizes):
        try:
            return original(model, *given, load_arg=load_arg, **named)
        except CheckpointException as error:
            raise CheckpointError(f"--load {folder}: cannot be read: {error}") from error


def has_checkpoint(folder: str | None) -> bool:
    """Return whether a folder has a tracker, or checkpoints whose tracker was lost: Megatron would
    begin anew and save over these."""
    if folder is None or checkpoint_exists(folder):
        return folder is not None
    return Path(folder).is_dir() and bool(folders.complete_steps(Path(folder)))


def _may_fall_back(args: Any) -> bool:
    """Return whether an older checkpoint does: nobody named a checkpoint, and no part is in use
    already."""
    return not args.ckpt_step and not args.use_checkpoint_args


@contextmanager
def _step_for_megatron(args: Any, step: int | None) -> Iterator[None]:
    asked = args.ckpt_step
    if step is not None:
        args.ckpt_step = step
    try:
        yield
    finally:
        args.ckpt_step = asked


def _sizes_for_megatron(folder: Path, step: int | None, ranks: UnlikeRanks) -> tuple[int, int]:
    """The sizes that all ranks compare with rank 0's of the checkpoint.  Collective.

    What a rank knows of a suspect result (`--rerun-mode`) has a meaning under the same plan alone;
    sizes of no rank keep it out otherwise.
    """

    def is_same_plan() -> int:
        at = _first_choice(folder, None) if step is None else step
        path = folder / "release" if at == _RELEASE else folders.step_folder(folder, at)
        return int(has_manifest(path) and read_manifest(path).plan == ranks.plan_hash)

    return ranks.sizes_of_rank_0 if _agreed(is_same_plan) else (0, 0)


@contextmanager
def _alike_on_all_ranks(args: Any, sizes: tuple[int, int] | None) -> Iterator[None]:
    """Give all ranks the same `sizes`: Megatron decides by them what is read, on every rank."""
    if sizes is None:
        yield
        return
    own = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    args.tensor_model_parallel_size, args.pipeline_model_parallel_size = sizes
    try:
        yield
    finally:
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size = own


def sound_step(folder: Path, asked: int | None, may_fall_back: bool) -> int | None:
    """The step whose checkpoint is whole and is to be loaded.  Collective.

    Args:
        asked: the step that the user names; None for the tracker's.
        may_fall_back: go on from an older one where the first is damaged.
    Returns:
        None for the one that the tracker names (a release has no step).
    Raises:
        CheckpointError: there is none.
    """
    # All ranks have to look at the same step.
    first = _agreed(lambda: _first_choice(folder, asked))
    found: list[str] = []
    at = first
    # Check a whole checkpoint on all ranks; take the first one without faults.
    while True:
        path = folder / "release" if at == _RELEASE else folders.step_folder(folder, at)
        faults = _faults(path)
        if not faults:
            break
        found.append(f"{path} is refused:\n    " + "\n    ".join(faults))
        # Go back by one step, if that is allowed and there is one.
        before = partial(_next_choice, folder, at)
        at = _agreed(before) if may_fall_back and at >= 0 else _NONE
        if at == _NONE:
            raise CheckpointError(
                "\n  ".join([f"--load {folder}: no checkpoint in it can be loaded.", *found])
                + "\n  Restore the files, name another checkpoint with --ckpt-step, or leave --load"
                " out to begin anew."
            )
    # Tell once what was refused and what is loaded.
    if dist.get_rank() == 0:
        _tell(folder, path, at, found)
    return None if at == first and asked is None else at


def _first_choice(folder: Path, asked: int | None) -> int:
    """What the user names, or the tracker; a broken tracker is written anew."""
    # A save may have been interrupted between two renames.
    folders.restore(folder)
    if asked:
        return asked
    tracker = folder / folders.TRACKER
    is_there = tracker.is_file()
    text = tracker.read_text(errors="replace").strip() if is_there else ""
    if text == "release":
        return _RELEASE
    if text.isdecimal():
        return int(text)
    # The tracker is damaged or lost: manifests tell which checkpoints are complete.
    steps = folders.complete_steps(folder)
    if not steps:
        raise CheckpointError(
            f"{tracker}: holds {text[:40]!r}, no step, and no checkpoint beside it has a manifest. "
            "Write the step of the checkpoint into it that you trust."
        )
    why = f"holds {text[:40]!r}, no step" if is_there else "is missing"
    _warn(f"{tracker} {why}; the newest complete one is {steps[0]}")
    folders.write_tracker(tracker, str(steps[0]))
    return steps[0]


def _next_choice(folder: Path, before: int) -> int:
    return next((step for step in folders.complete_steps(folder) if step < before), _NONE)


def _faults(path: Path) -> list[str]:
    """List the faults of a checkpoint, found by all ranks together, alike on all ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own: list[str] = []
    try:
        if not path.is_dir():
            # All ranks see the same folder, so one of them reports.
            own += ["it is not there"] * (rank == 0)
        elif has_manifest(path):
            manifest = read_manifest(path)
            # Largest files first, dealt out in turn: ranks read about equally many bytes.
            names = sorted(manifest.files, key=lambda name: -manifest.files[name].size)
            own += faults_of(path, manifest, names[rank::num_ranks])
            if rank == 0:
                own += strangers_in(path, manifest)
        if rank == 0 and not own and (path / ".metadata").exists():
            read_metadata(path / ".metadata")
    except OSError as error:
        own.append(f"{error.filename}: cannot be read: {error.strerror}")
    except HeteroError as error:
        own.append(str(error))
    everybodys = [fault for text in gather_texts(json.dumps(own)) for fault in json.loads(text)]
    return list(dict.fromkeys(everybodys))


def _tell(folder: Path, path: Path, step: int, refused: list[str]) -> None:
    for line in refused:
        _warn(line)
    if refused:
        _warn(f"{path} is whole and is loaded instead; the steps after {step} are trained again")
    elif not has_manifest(path):
        print(
            f"> megatron-hetero: {path} has no manifest (stock Megatron wrote it, or an older "
            "version): its files cannot be checked",
            flush=True,
        )
    # A newer checkpoint than the loaded one is worth a word, unless it was refused above.
    newer = [s for s in folders.complete_steps(folder) if 0 <= step < s]
    if newer and not refused:
        _warn(
            f"{path} is loaded, as the tracker or --ckpt-step says, though complete checkpoints of "
            f"later steps are there: {', '.join(map(str, sorted(newer)))}"
        )


def _agreed(choose: Callable[[], int]) -> int:
    """Rank 0's choice on all ranks.

    Raises:
        CheckpointError: rank 0 could not choose; the others point to its log.
    """
    failure: HeteroError | None = None
    step, failed = _NONE, 0
    if dist.get_rank() == 0:
        try:
            step = choose()
        except OSError as error:
            failure = CheckpointError(f"{error.filename}: {error.strerror}")
        except HeteroError as error:
            failure = error
        failed = int(failure is not None)
    said = torch.tensor([step, failed], dtype=torch.int64, device=torch.cuda.current_device())
    dist.broadcast(said, src=0)
    if failure is not None:
        raise failure
    if said[1].item():
        raise CheckpointError("rank 0 cannot choose a checkpoint; its log says why")
    return int(said[0].item())


def _warn(text: str) -> None:
    print(f"> megatron-hetero: WARNING: {text}", flush=True)
