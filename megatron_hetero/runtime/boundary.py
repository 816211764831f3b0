"""Stage boundaries between unlike tensor-parallel widths: every byte crosses once.

An activation `[s, b, h]` is cut into equal flat ranges, one for each rank of the sending stage
(what sequence parallelism holds there anyway; without it every rank holds all of it and sends only
its range), and likewise for the receiving stage.  Where two ranges overlap, the overlap goes
straight from its holder to its user, all pieces of a hop in one batched call.  A receiving stage
without sequence parallelism then gathers the ranges inside its own tensor-parallel group, over its
own fast links.  Gradients go back the same way with the roles exchanged.

Megatron's own bridge and HexiScale send everything to a leader and broadcast it; the link between
the stages then carries the same bytes, but through one pair of devices.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.runtime.groups import RankGroups


@dataclass(frozen=True)
class Piece:
    """Elements `start:stop` of the flat activation, exchanged with global rank `peer`."""

    peer: int
    start: int
    stop: int


def flat_range(num_elements: int, width: int, index: int) -> tuple[int, int]:
    """The range of an activation that rank `index` of a stage of `width` ranks stands for.

    Ranges are equal (the last one may be short), so that they can be gathered by one collective.
    """
    size = -(-num_elements // width)
    return min(index * size, num_elements), min((index + 1) * size, num_elements)


def pieces(
    num_elements: int, own_width: int, own_index: int, peer_ranks: tuple[int, ...]
) -> tuple[Piece, ...]:
    """What a rank exchanges with each rank of the neighbouring stage, in order of position."""
    own_start, own_stop = flat_range(num_elements, own_width, own_index)
    found = []
    for index, peer in enumerate(peer_ranks):
        start, stop = flat_range(num_elements, len(peer_ranks), index)
        start, stop = max(start, own_start), min(stop, own_stop)
        if start < stop:
            found.append(Piece(peer, start, stop))
    return tuple(found)


class Boundary:
    """This rank's side of one boundary: sends one way, receives the other.

    `peer_ranks` are the global ranks of the neighbouring stage, in tensor order; `outward` and
    `inward` the groups of the messages to and from it; `config` the model's.  Nothing here waits
    but `take` and `finish_sends`.
    """

    def __init__(
        self,
        groups: RankGroups,
        peer_ranks: tuple[int, ...],
        outward: dist.ProcessGroup,
        inward: dist.ProcessGroup,
        config: Any,
    ) -> None:
        self._groups = groups
        self._outward = outward
        self._inward = inward
        self._config = config
        self._width = groups.tensor.size()
        self._index = groups.tensor.rank()
        self._peers = peer_ranks
        self._sent: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self._num_forgotten = 0
        self._posted: deque[tuple[list[dist.Work], Arrival]] = deque()

    def begin(self) -> None:
        """A step begins: messages are counted from here."""
        self._num_forgotten = 0

    def send(self, tensor: torch.Tensor) -> None:
        """Start sending `tensor`; what is sent is kept until it is known to have arrived."""
        ops = self.send_ops(tensor, self._config.sequence_parallel)
        works = dist.batch_isend_irecv(ops) if ops else []
        self._sent.append((works, [op.tensor for op in ops]))

    def forget_sends(self, num_arrived: int) -> None:
        """Let go of the first `num_arrived` sends of this step, which are known to have arrived."""
        while self._num_forgotten < num_arrived:
            works, _ = self._sent.popleft()
            for work in works:
                work.wait()
            self._num_forgotten += 1

    def finish_sends(self) -> None:
        """Wait until all that was sent has arrived."""
        self.forget_sends(self._num_forgotten + len(self._sent))

    def post_receive(self, shape: tuple[int, ...]) -> None:
        """Make room for the next message, of `shape` on this rank."""
        ops, arrival = self.receive_ops(
            shape, self._config.pipeline_dtype, self._config.sequence_parallel
        )
        self._posted.append((dist.batch_isend_irecv(ops) if ops else [], arrival))

    def take(self) -> torch.Tensor:
        """Wait for the oldest message that was posted for."""
        works, arrival = self._posted.popleft()
        for work in works:
            work.wait()
        return arrival.finish()

    def send_ops(self, tensor: torch.Tensor, sequence_parallel: bool) -> list[dist.P2POp]:
        """The sends of `tensor`: this rank's shard under sequence parallelism, else all of it."""
        flat = tensor.detach().contiguous().view(-1)
        num_elements = flat.numel() * (self._width if sequence_parallel else 1)
        own_start, _ = flat_range(num_elements, self._width, self._index)
        shift = own_start if sequence_parallel else 0
        ops = []
        for piece in pieces(num_elements, self._width, self._index, self._peers):
            part = flat[piece.start - shift : piece.stop - shift]
            ops.append(dist.P2POp(dist.isend, part, piece.peer, self._outward))
        return ops

    def receive_ops(
        self, shape: tuple[int, ...], dtype: torch.dtype, sequence_parallel: bool
    ) -> tuple[list[dist.P2POp], Arrival]:
        """The receives of a tensor that has `shape` on this rank, and what becomes of them."""
        num_elements = prod(shape) * (self._width if sequence_parallel else 1)
        own_start, _ = flat_range(num_elements, self._width, self._index)
        size = flat_range(num_elements, self._width, 0)[1]
        device = torch.cuda.current_device()
        own = torch.empty(size, dtype=dtype, device=device)
        ops = [
            dist.P2POp(
                dist.irecv, own[p.start - own_start : p.stop - own_start], p.peer, self._inward
            )
            for p in pieces(num_elements, self._width, self._index, self._peers)
        ]
        whole = not sequence_parallel and self._width > 1
        return ops, Arrival(own, shape, self._groups.tensor if whole else None)


@dataclass(frozen=True)
class Arrival:
    """A tensor under way: `finish` after its messages have arrived gives it its shape."""

    own: torch.Tensor
    shape: tuple[int, ...]
    gather_group: dist.ProcessGroup | None

    def finish(self) -> torch.Tensor:
        flat = self.own
        if self.gather_group is not None:
            flat = self.own.new_empty(self.own.numel() * self.gather_group.size())
            dist.all_gather_into_tensor(flat, self.own, group=self.gather_group)
        return flat[: prod(self.shape)].view(self.shape).requires_grad_()


class PipelineCommunicator:
    """What Megatron's loop is given as `pretrain(p2p_communicator=)` and hands to the schedule.

    `boundaries` are this rank's, by their place in the chain of model chunks; a replica of a single
    stage has none.  The properties answer what Megatron asks of its own `P2PCommunicator`.
    """

    def __init__(self, groups: RankGroups, config: Any) -> None:
        self.config = config
        self.pp_group = groups.pipeline
        self.boundaries: dict[int, Boundary] = {}
        for number, hop in groups.hops.items():
            before, after = groups.chain[number], groups.chain[number + 1]
            if before == groups.pipeline.stage:
                peers, outward, inward = groups.stage_ranks[after], hop.forward, hop.backward
            else:
                peers, outward, inward = groups.stage_ranks[before], hop.backward, hop.forward
            self.boundaries[number] = Boundary(groups, peers, outward, inward, config)

    @property
    def is_pp_first_stage(self) -> bool:
        return self.pp_group.rank() == 0

    @property
    def is_pp_last_stage(self) -> bool:
        return self.pp_group.rank() == self.pp_group.size() - 1

    @property
    def total_stages(self) -> int:
        return self.pp_group.size()

    @property
    def current_stage(self) -> int:
        return self.pp_group.rank()
