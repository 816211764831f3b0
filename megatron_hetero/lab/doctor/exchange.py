"""Exchange of known values through one group, to find hangs and wrong sums.

Every number is a small integer in fp32, where sums are exact, and 0 or 1 in bf16, where sums over
up to 256 ranks are exact.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.preflight.groups import GroupTest
from megatron_hetero.runtime import backend

_POLL_S = 0.005
_SMALL, _LARGE = 1003, 1 << 20
"""Elements; NCCL chooses its protocol by size, and an odd count leaves a remainder."""


class HangError(Exception):
    """An exchange did not end within its time."""


class WrongValueError(Exception):
    """An exchange ended with other values than were sent."""


def pattern(rank: int, num_elements: int, device: torch.device, dtype: torch.dtype) -> Any:
    """Make the input of `rank`, shape `[num_elements]`: 0 to 100 in fp32, 0 or 1 in bf16."""
    index = torch.arange(num_elements, device=device)
    modulus = 2 if dtype == torch.bfloat16 else 101
    return ((index + 13 * rank) % modulus).to(dtype)


def run_test(test: GroupTest, group: Any, device: torch.device, limit_s: float) -> None:
    """Run this rank's part of a test. Collective over `test.ranks`.

    Args:
        test: the ranks, and the kind of exchange.
        group: their process group.
        device: device of the tensors.
        limit_s: limit of each exchange, in seconds.
    Raises:
        HangError: an exchange took longer than `limit_s`.
        WrongValueError: a value arrived wrong; the message says which.
        RuntimeError: torch's own, when an exchange failed at once.
    """
    wrong: list[str] = []
    for num_elements in (_SMALL, _LARGE):
        if test.kind == "boundary":
            wrong += _exchange_boundary(test, group, num_elements, device, limit_s)
        else:
            for dtype in (torch.float32, torch.bfloat16):
                wrong += _check_all_reduce(test.ranks, group, num_elements, device, dtype, limit_s)
            wrong += _check_all_gather(test.ranks, group, num_elements, device, limit_s)
    # Only now: a rank that left early would look like a hang to the others.
    if wrong:
        raise WrongValueError("; ".join(wrong))


def _check_all_reduce(
    ranks: Sequence[int],
    group: Any,
    num_elements: int,
    device: torch.device,
    dtype: torch.dtype,
    limit_s: float,
) -> list[str]:
    found = pattern(dist.get_rank(), num_elements, device, dtype)
    _finish(lambda: [dist.all_reduce(found, group=group, async_op=True)], limit_s)
    # Each rank can make the sum alone, because `pattern` is known for every rank.
    wanted = torch.zeros(num_elements, device=device)
    for rank in ranks:
        wanted += pattern(rank, num_elements, device, dtype)
    return _compare(found.float(), wanted, f"all-reduce of {num_elements} numbers in {dtype}")


def _check_all_gather(
    ranks: Sequence[int], group: Any, num_elements: int, device: torch.device, limit_s: float
) -> list[str]:
    sent = pattern(dist.get_rank(), num_elements, device, torch.float32)
    # -1 is in no pattern, so that an element that was never written is found.
    received = torch.full((len(ranks) * num_elements,), -1.0, device=device)
    _finish(
        lambda: [dist.all_gather_into_tensor(received, sent, group=group, async_op=True)], limit_s
    )
    wanted = torch.cat([pattern(rank, num_elements, device, torch.float32) for rank in ranks])
    return _compare(received, wanted, f"all-gather of {num_elements} numbers")


def _exchange_boundary(
    test: GroupTest, group: Any, num_elements: int, device: torch.device, limit_s: float
) -> list[str]:
    """Exchange all messages of a boundary at once, both ways, as the pipeline does."""
    rank = dist.get_rank()
    # The ranks on the other side of the boundary.
    others = [r for r in test.ranks if (r in test.senders) != (rank in test.senders)]
    sent = pattern(rank, num_elements, device, torch.float32)
    received = {r: torch.full((num_elements,), -1.0, device=device) for r in others}
    # Sends and receives form one batch, so that NCCL starts them together and
    # none waits for the other.
    operations = [
        operation
        for other in others
        for operation in (
            dist.P2POp(dist.isend, sent, other, group),
            dist.P2POp(dist.irecv, received[other], other, group),
        )
    ]
    _finish(lambda: dist.batch_isend_irecv(operations), limit_s)
    wrong: list[str] = []
    for other in others:
        wanted = pattern(other, num_elements, device, torch.float32)
        what = f"message of {num_elements} numbers from rank {other}"
        wrong += _compare(received[other], wanted, what)
    return wrong


def _finish(start: Callable[[], Sequence[Any]], limit_s: float) -> None:
    """Wait for work with a limit; a stuck NCCL kernel would block a plain wait for ever."""
    deadline = time.monotonic() + limit_s
    try:
        works = [work for work in start() if work is not None]
        # NCCL's `wait` holds up the stream, not the host, and knows no limit, so the host polls.
        if backend.cuda_is_usable():
            done = torch.cuda.Event()
            for work in works:
                while not work.is_completed():
                    _check_deadline(deadline, limit_s)
            # The event also covers torch's own stream, on which the input was made.
            done.record()
            while not done.query():
                _check_deadline(deadline, limit_s)
            return
        for work in works:
            # Gloo's wait takes a limit; work that has ended already gets 1 ms.
            work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    except RuntimeError as error:
        # Gloo may give up slightly early; an error long before the limit is no hang.
        if time.monotonic() >= deadline - 0.1 * limit_s:
            raise HangError(f"no end after {limit_s:g} s") from error
        raise


def _check_deadline(deadline: float, limit_s: float) -> None:
    if time.monotonic() > deadline:
        raise HangError(f"no end after {limit_s:g} s")
    time.sleep(_POLL_S)


def _compare(found: torch.Tensor, wanted: torch.Tensor, what: str) -> list[str]:
    """Describe the difference between two tensors; empty if there is none."""
    wrong = torch.nonzero(found != wanted).flatten()
    if not len(wrong):
        return []
    i = int(wrong[0])
    return [
        f"{what}: {len(wrong)} of {len(wanted)} are wrong, first at {i}: {float(found[i]):g} for "
        f"{float(wanted[i]):g}"
    ]
