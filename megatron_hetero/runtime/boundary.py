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
from collections.abc import Sequence
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
    """This rank's side of one boundary: sends and receives in either direction.

    `peer_ranks` are the global ranks of the neighbouring stage, in tensor order; `outward` and
    `inward` the groups of the messages to and from it.  Of its sends at most `max_unfinished` are
    not known to have arrived.
    """

    def __init__(
        self,
        groups: RankGroups,
        peer_ranks: tuple[int, ...],
        outward: dist.ProcessGroup,
        inward: dist.ProcessGroup,
        max_unfinished: int,
    ) -> None:
        self._groups = groups
        self._outward = outward
        self._inward = inward
        self._max_unfinished = max_unfinished
        self._unfinished: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self._width = groups.tensor.size()
        self._index = groups.tensor.rank()
        self._peers = peer_ranks

    def send(self, tensor: torch.Tensor, sequence_parallel: bool) -> None:
        """Start sending `tensor`; what is sent is kept until it is known to have arrived."""
        ops = self.send_ops(tensor, sequence_parallel)
        if ops:
            self._unfinished.append((dist.batch_isend_irecv(ops), [op.tensor for op in ops]))
        self.finish_sends(self._max_unfinished)

    def finish_sends(self, max_left: int = 0) -> None:
        """Wait for the oldest sends until at most `max_left` are left."""
        while len(self._unfinished) > max_left:
            requests, _ = self._unfinished.popleft()
            for request in requests:
                request.wait()

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
    """Point-to-point of one rank, in the words of Megatron's `P2PCommunicator`.

    Given to `pretrain(p2p_communicator=)`; the non-interleaved 1F1B schedule calls the six methods
    and reads the four properties.  Single-stage replicas have one too, which sends nothing.

    Only receives are waited for.  A send is waited for when it must have arrived long since, so no
    rank ever waits for a neighbour to be ready to receive: a stage may launch more forwards ahead
    of its first backward than 1F1B does, which hides a slow hop.

    Args:
        num_launched_forwards: [stage] -> forwards ahead of the first backward; falls along the
            pipeline, as `plan.check_structure` has it.
    """

    def __init__(
        self, groups: RankGroups, config: Any, num_launched_forwards: Sequence[int]
    ) -> None:
        self.config = config
        self.pp_group = groups.pipeline
        self._launched = num_launched_forwards
        stage, stages, hops = groups.pipeline.stage, groups.stage_ranks, groups.hops
        self._previous = self._next = None
        # Forward k leaves after backward k - launched has come back, hence after forward
        # k - launched has arrived; a gradient likewise answers to the launches of the stage before.
        if stage > 0:
            hop = hops[stage - 1]
            self._previous = Boundary(
                groups, stages[stage - 1], hop.backward, hop.forward, self._launched[stage - 1]
            )
        if stage + 1 < len(stages):
            hop = hops[stage]
            self._next = Boundary(
                groups, stages[stage + 1], hop.forward, hop.backward, self._launched[stage]
            )

    @property
    def is_pp_first_stage(self) -> bool:
        return self._previous is None

    @property
    def is_pp_last_stage(self) -> bool:
        return self._next is None

    @property
    def total_stages(self) -> int:
        """Megatron launches `total_stages - current_stage` forwards ahead of the first backward and
        reads it for nothing else, so this is where a stage's own number goes."""
        return self.current_stage + self._launched[self.current_stage]

    @property
    def current_stage(self) -> int:
        return self.pp_group.rank()

    # The flags say what `self._previous` and `self._next` say already; Megatron passes them along.

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        return self._exchange(None, None, self._previous, tensor_shapes)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        return self._exchange(None, None, self._next, tensor_shapes)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        self._exchange(self._next, output_tensors, None, None)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        self._exchange(self._previous, input_tensor_grads, None, None)

    def send_forward_recv_backward(
        self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool
    ) -> Any:
        return self._exchange(self._next, output_tensors, self._next, tensor_shapes)

    def send_backward_recv_forward(
        self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool
    ) -> Any:
        return self._exchange(self._previous, input_tensor_grads, self._previous, tensor_shapes)

    def _exchange(
        self, to: Boundary | None, sent: Any, source: Boundary | None, tensor_shapes: Any
    ) -> list[torch.Tensor | None]:
        """Send `sent` over `to` and receive over `source` in one batch; either may be None.

        Megatron passes a tensor or a list of one, and always a list of one shape (several were for
        models with two streams); a list of one is what it wants back.
        """
        arrival = None
        receives: list[dist.P2POp] = []
        if source is not None:
            (shape,) = tensor_shapes
            receives, arrival = source.receive_ops(
                tuple(shape), self.config.pipeline_dtype, self.config.sequence_parallel
            )
        if to is not None:
            (tensor,) = sent if isinstance(sent, list) else [sent]
            to.send(tensor, self.config.sequence_parallel)
        if receives:
            for request in dist.batch_isend_irecv(receives):
                request.wait()
        return [arrival.finish() if arrival is not None else None]

    def finish_sends(self) -> None:
        """Wait until all that was sent has arrived; called at the end of a step."""
        for boundary in (self._previous, self._next):
            if boundary is not None:
                boundary.finish_sends()
