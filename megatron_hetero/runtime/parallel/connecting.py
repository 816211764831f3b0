"""Process groups with communicators made and connected at the start, in the same order on all
ranks.

NCCL does both when they are first needed: a communicator at the first operation of its group, a
connection at the first message of a pair.  Either holds up the host of every rank until the others
come there, and inside of a step they may never come: a stage asks for its first gradient before it
sends the activation that the gradient is of.  `make_group` therefore makes the communicator at once
(torch does if the group is bound to a card) and runs one small operation of the kind that the group
is for.  All ranks go through the groups in one order, so the first communicator that is not done
has all of its ranks there, or on their way.  Over gloo the same operations run.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.plan.communication.communicators import CHANNELS_OF_MESSAGES
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.faults.progress import PROGRESS, Phase

Pair = tuple[int, int]
"""(sender, receiver), global ranks."""


@dataclass(frozen=True)
class Connections:
    """Connections that the operations of a group use.

    Attributes:
        collectives: all-reduces, gathers or broadcasts, along rings and trees.
        all_to_all: each rank with each.
        pairs: of single messages.
    """

    collectives: bool = True
    all_to_all: bool = False
    pairs: frozenset[Pair] = frozenset()

    @staticmethod
    def of_messages(pairs: Collection[Pair]) -> Connections:
        """Return the connections of a group for messages alone."""
        return Connections(collectives=False, pairs=frozenset(pairs))


COLLECTIVES = Connections()
ALL_TO_ALL = Connections(all_to_all=True)


def make_group(
    ranks: Sequence[int],
    timeout: timedelta,
    what: str,
    connections: Connections = COLLECTIVES,
    *,
    is_urgent: bool = False,
) -> dist.ProcessGroup:
    """Create a process group with communicator and connections.

    Every rank of the job calls it for every group, in one order; those of the group wait for each
    other.

    Args:
        ranks: of the group, more than one.
        timeout: limit of every operation.
        what: the group's use, for messages.
        connections: which to make.
        is_urgent: the communicator's stream is one of high priority (`URGENT_USES`).
    Returns:
        The group; torch's mark of a non-member on other ranks.
    Raises:
        EnvironmentMismatchError: the communication library cannot connect the ranks.
    """
    # NCCL makes a communicator at once if the group is bound to a card.
    over_nccl = dist.get_backend() == dist.Backend.NCCL
    named: dict[str, Any] = {"group_desc": what}
    if over_nccl and dist.get_rank() in ranks:
        named["device_id"] = torch.device("cuda", torch.cuda.current_device())
    # Groups for messages alone get streams by urgency.
    if over_nccl and not connections.collectives:
        named["pg_options"] = _message_options(is_urgent)
    # Every rank makes the group; its members connect.
    PROGRESS.enter(Phase.CONNECT)
    try:
        group = dist.new_group(list(ranks), timeout=timeout, **named)
        if dist.get_rank() in ranks:
            _connect(group, connections)
    except RuntimeError as error:  # of torch, whose own kinds of errors are among them
        raise connection_error(what, ranks, error) from error
    return group


def connect_world() -> None:
    """Make and connect the communicator of the whole job.  Collective.

    Its first operation also tells torch the card of this process, which a barrier would guess
    otherwise: from the rank in the job, which on machines of unlike numbers of cards is another's.

    Raises:
        EnvironmentMismatchError: the communication library cannot connect the ranks.
    """
    PROGRESS.enter(Phase.CONNECT)
    if dist.get_world_size() > 1:
        try:
            _connect(dist.group.WORLD, COLLECTIVES)
        except RuntimeError as error:
            ranks = range(dist.get_world_size())
            raise connection_error("the whole job", ranks, error) from error


def connection_error(what: str, ranks: Sequence[int], error: Exception) -> EnvironmentMismatchError:
    """Return the error of unconnected ranks, with advice."""
    named = f"{ranks[0]} to {ranks[-1]}" if len(ranks) > 8 else ", ".join(map(str, ranks))
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return EnvironmentMismatchError(
        f"rank {dist.get_rank()} cannot connect to the ranks of {what} ({named}): {reason}. "
        "Let NCCL_SOCKET_IFNAME (GLOO_SOCKET_IFNAME over gloo) name the network interface by which "
        "their machines reach each other, and NCCL_DEBUG=INFO say what NCCL tries."
    )


def _connect(group: dist.ProcessGroup, connections: Connections) -> None:
    """Run the first operations of a group, to their end."""
    device, size = torch.cuda.current_device(), group.size()
    if connections.collectives:
        dist.all_reduce(torch.zeros(1, device=device), group=group)
    if connections.all_to_all:
        received, sent = torch.empty(size, device=device), torch.zeros(size, device=device)
        dist.all_to_all_single(received, sent, group=group)
    if connections.pairs:
        # Both ends of every pair post at once, so that none waits for the other's turn.
        rank = dist.get_rank()
        messages = [
            dist.P2POp(
                dist.isend if sender == rank else dist.irecv,
                torch.zeros(1, device=device),
                receiver if sender == rank else sender,
                group,
            )
            for sender, receiver in sorted(connections.pairs)
            if rank in (sender, receiver)
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
    # NCCL returns before the device is done.
    if backend.cuda_is_usable():
        torch.cuda.synchronize()


def _message_options(is_urgent: bool) -> Any:
    """Return NCCL's options of a communicator for messages.

    torch gives each communicator one of 32 streams in turn, of each priority.  Messages of the two
    directions take streams of unlike priority, because two communicators must not share a stream.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=is_urgent)
    options.config.min_ctas, options.config.max_ctas = 1, CHANNELS_OF_MESSAGES
    return options
