"""`megatron.training.initialize._initialize_tp_communicators`: buffers of `--tp-comm-overlap`.

Megatron asks Transformer Engine to divide all ranks of the job into groups of one width.  A plan
has stages of unlike width, so each tensor-parallel group is shown to Transformer Engine as a job of
its own, which `initialize_ub` knows too ("TP model on single NVLink domain, no replication").  The
groups do it one after the other: Transformer Engine names the sockets over which a group hands out
its memory after the number of the group in the job, which is 0 for all of them then.

Megatron's own call comes later, and finds nothing left to do.  Untested on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megatron_hetero.errors import EnvironmentMismatchError, UnsupportedError
from megatron_hetero.flags.support.tensor_overlap import FLAG
from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.initialize",
    name="_initialize_tp_communicators",
    reason="Megatron takes all tensor-parallel groups to be of one width",
    known={"8a7567514f268f6c": TESTED},
)


def apply(groups: Sequence[Sequence[int]], timeout: timedelta, backend: str) -> None:
    """Make the buffers of every tensor-parallel group, and leave Megatron none to make.

    Collective: all ranks of the job call it.

    Args:
        groups: global ranks of each tensor-parallel group of more than one, in one order on all
            ranks.
        timeout: limit of every operation.
        backend: `--tp-comm-bootstrap-backend`.
    Raises:
        EnvironmentMismatchError: Transformer Engine would move this process to another GPU.
        UnsupportedError: the installed Transformer Engine makes its groups in another way.
    """
    REPLACEMENT.apply(_nothing)
    rank = dist.get_rank()
    # Every rank makes every group, as torch asks.
    made = [dist.new_group(list(ranks), timeout=timeout, backend=backend) for ranks in groups]
    # One group at a time, because all of them would use the same names of sockets.
    for ranks, group in zip(groups, made, strict=True):
        if rank in ranks:
            _check_device(list(ranks).index(rank), len(ranks))
            with _shown_alone(group, backend):
                REPLACEMENT.original()()
        dist.barrier()


def _nothing() -> None:
    """Stand for Megatron's own call: the buffers are there."""


def _check_device(place: int, width: int) -> None:
    """Refuse a group that has all GPUs of the machine in another order: `create_communicator_
    grouped2` of Transformer Engine moves each process of such a group to the GPU of its place."""
    current = torch.cuda.current_device()
    if torch.cuda.device_count() == width and current != place:
        raise EnvironmentMismatchError(
            f"{FLAG}: a tensor-parallel group has all {width} GPUs of the machine, and GPU "
            f"{current} at place {place}; Transformer Engine would move that process to GPU "
            f"{place}. List the stage's devices in ascending order, or leave the flag out."
        )


@contextlib.contextmanager
def _shown_alone(group: dist.ProcessGroup, backend: str) -> Iterator[None]:
    """Let Transformer Engine take `group` for the whole job, while it makes its buffers.

    Raises:
        UnsupportedError: it asks for groups that it would not need then.
    """

    def whole_job(*args: Any, **named: Any) -> dist.ProcessGroup:
        # The one call with which `initialize_ub` makes a group of the whole job.
        if args or named != {"backend": backend}:
            refuse()
        return group

    def refuse(*args: Any, **named: Any) -> NoReturn:
        raise UnsupportedError(
            f"{FLAG}: the installed Transformer Engine makes its groups in a way that is not known "
            "here (one built with MPI does). Leave the flag out."
        )

    shown: dict[str, Callable[..., Any]] = {
        "new_group": whole_job,
        "new_subgroups_by_enumeration": refuse,
    }
    kept = {name: getattr(dist, name) for name in shown}
    for name, function in shown.items():
        setattr(dist, name, function)
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(dist, name, function)
