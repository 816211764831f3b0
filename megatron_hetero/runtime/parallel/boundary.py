"""Stage boundaries between unlike tensor-parallel widths: every byte crosses once.

Every rank of the sending stage stands for a part of an activation, and so does every rank of the
receiving one (`plan.sharding.stage_ranges`).  Where two parts overlap, the overlap goes straight
from its holder to its user, all pieces of a hop in one batched call.  A receiving stage without
sequence parallelism then gathers the parts inside its own tensor-parallel group, over its own fast
links.
Gradients go back the same way with the roles exchanged.

Megatron's own bridge and HexiScale send everything to a leader and broadcast it; the link between
the stages then carries the same bytes, but through one pair of devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_hetero.errors import UsageError
from megatron_hetero.plan.sharding.stage_ranges import StageRanks, flat_range, pieces
from megatron_hetero.runtime.observe.traffic import BoundaryTraffic
from megatron_hetero.runtime.parallel.groups import RankGroups


class Boundary:
    """This rank's side of one boundary: sends one way, receives the other.

    Args:
        stage: the ranks of this stage; by default those of the tensor-parallel group.
        peers: the ranks of the neighbouring stage.
        outward, inward: the groups of the messages to and from it.
        config: the model's.
        shapes: a group for the shapes of activations, which go ahead of them where sequences have
            unlike lengths (`config.variable_seq_lengths`).  A group of its own, because a
            transport matches the messages of one group in order, and shapes are waited for first.

    Nothing here waits but `take` and `finish_sends`.
    """

    def __init__(
        self,
        groups: RankGroups,
        peers: StageRanks,
        outward: dist.ProcessGroup,
        inward: dist.ProcessGroup,
        config: Any,
        stage: StageRanks | None = None,
        shapes: dist.ProcessGroup | None = None,
    ) -> None:
        self._groups = groups
        self._outward, self._inward, self._shapes = outward, inward, shapes
        self._config = config
        self._width = groups.tensor.size()
        self._peers = peers
        self._stage = stage or StageRanks(tuple(range(self._width)))
        self._index = groups.tensor.rank()
        if stage is not None and len(stage.ranks) > self._width:
            self._index = stage.ranks.index(dist.get_rank())
        self._sent: deque[tuple[list[dist.Work], list[torch.Tensor]]] = deque()
        self._num_forgotten = 0
        self.traffic = BoundaryTraffic()
        self._posted: deque[_Announced | _UnderWay] = deque()

    def begin(self) -> None:
        """A step begins: messages are counted from here."""
        self._num_forgotten = 0

    def send(self, tensor: torch.Tensor, announce: bool = False) -> None:
        """Start sending `tensor`; what is sent is kept until it is known to have arrived.

        Args:
            announce: tell the receivers its shape first; they have posted for it without one.
        """
        ops = self._shape_ops(tensor) if announce else []
        parts = self.send_ops(tensor, self._config.sequence_parallel)
        whole = self._num_elements(tensor.numel(), self._config.sequence_parallel)
        self.traffic.count([op.tensor for op in parts], whole * tensor.element_size())
        ops += parts
        works = [work for group in _by_group(ops) for work in dist.batch_isend_irecv(group)]
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

    def post_receive(self, shape: tuple[int, ...] | None) -> None:
        """Make room for the next message, of `shape` on this rank; None: it is announced."""
        if shape is not None:
            self._posted.append(self._receive(shape))
            return
        told = torch.empty(2, dtype=torch.int64, device=torch.cuda.current_device())
        peer = self._peers.ranks[self._index % len(self._peers.ranks)]
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, told, peer, self._shapes)])
        self._posted.append(_Announced(works, told))

    def ask_for_announced(self) -> None:
        """Make room for the messages whose shapes have arrived."""
        self._ask(lambda place, works: all(work.is_completed() for work in works))

    def take(self) -> torch.Tensor:
        """Wait for the oldest message that was posted for."""
        self._ask(lambda place, works: place == 0 or all(work.is_completed() for work in works))
        under_way = self._posted.popleft()
        if not isinstance(under_way, _UnderWay):
            raise RuntimeError("a message was taken whose shape has not arrived")
        for work in under_way.works:
            work.wait()
        return under_way.arrival.finish()

    def _ask(self, is_due: Callable[[int, list[dist.Work]], bool]) -> None:
        """Post for announced messages, in order, as far as they are due."""
        for place, posted in enumerate(self._posted):
            if isinstance(posted, _UnderWay):
                continue
            if not is_due(place, posted.works):
                return
            for work in posted.works:
                work.wait()
            self._posted[place] = self._receive(self._own_shape(*posted.told.tolist()))

    def _own_shape(self, sequence: int, batch: int) -> tuple[int, ...]:
        """The shape on this rank of an activation of `sequence` tokens.

        Raises:
            UsageError: the stage cannot divide the sequence.
        """
        parts = self._stage.context * (self._width if self._config.sequence_parallel else 1)
        must_divide = parts * (2 if self._stage.context > 1 else 1)
        if sequence % must_divide:
            raise UsageError(
                f"a micro-batch has a sequence of {sequence} tokens, which a stage of "
                f"tensor-parallel width {self._width} and context parallelism "
                f"{self._stage.context} cannot divide: it must be a multiple of {must_divide}. "
                "Pad the micro-batch in the script's forward step."
            )
        return sequence // parts, batch, self._config.hidden_size

    def _receive(self, shape: tuple[int, ...]) -> _UnderWay:
        ops, arrival = self.receive_ops(
            shape, self._config.pipeline_dtype, self._config.sequence_parallel
        )
        return _UnderWay(dist.batch_isend_irecv(ops) if ops else [], arrival)

    def _num_elements(self, on_this_rank: int, sequence_parallel: bool) -> int:
        return on_this_rank * self._stage.context * (self._width if sequence_parallel else 1)

    def _shape_ops(self, tensor: torch.Tensor) -> list[dist.P2POp]:
        """Tell its shape, whole, to the ranks of the next stage that have this one to tell them."""
        whole = self._num_elements(tensor.shape[0], self._config.sequence_parallel)
        told = torch.tensor([whole, tensor.shape[1]], device=torch.cuda.current_device())
        num_tellers = len(self._stage.ranks)
        return [
            dist.P2POp(dist.isend, told, peer, self._shapes)
            for number, peer in enumerate(self._peers.ranks)
            if number % num_tellers == self._index
        ]

    def send_ops(self, tensor: torch.Tensor, sequence_parallel: bool) -> list[dist.P2POp]:
        """The sends of `tensor`: this rank's shard under sequence parallelism, else all of it."""
        flat = tensor.detach().contiguous().view(-1)
        if not sequence_parallel:
            start, stop = flat_range(flat.numel(), self._width, self._groups.tensor.rank())
            num_elements = self._num_elements(flat.numel(), False)
            flat = flat[start:stop]
        else:
            num_elements = self._num_elements(flat.numel(), True)
        return [
            dist.P2POp(dist.isend, flat[piece.own], piece.peer, self._outward)
            for piece in pieces(num_elements, self._stage, self._index, self._peers)
        ]

    def receive_ops(
        self, shape: tuple[int, ...], dtype: torch.dtype, sequence_parallel: bool
    ) -> tuple[list[dist.P2POp], Arrival]:
        """The receives of a tensor that has `shape` on this rank, and what becomes of them."""
        num_elements = self._num_elements(prod(shape), sequence_parallel)
        size = flat_range(num_elements // self._stage.context, self._width, 0)[1]
        own = torch.empty(size, dtype=dtype, device=torch.cuda.current_device())
        ops = [
            dist.P2POp(dist.irecv, own[piece.own], piece.peer, self._inward)
            for piece in pieces(num_elements, self._stage, self._index, self._peers)
        ]
        whole = not sequence_parallel and self._width > 1
        return ops, Arrival(own, shape, self._groups.tensor if whole else None)


def _by_group(ops: list[dist.P2POp]) -> Iterator[list[dist.P2POp]]:
    """A batch of messages is of one group."""
    for _, batch in groupby(ops, key=lambda op: id(op.group)):
        yield list(batch)


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


@dataclass(frozen=True)
class _Announced:
    """A message of which the shape is under way: `told` will be (tokens, sequences), whole."""

    works: list[dist.Work]
    told: torch.Tensor


@dataclass(frozen=True)
class _UnderWay:
    works: list[dist.Work]
    arrival: Arrival


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
                own, peers, outward, inward = before, after, hop.forward, hop.backward
            else:
                own, peers, outward, inward = after, before, hop.backward, hop.forward
            self.boundaries[number] = Boundary(
                groups,
                groups.stage_ranks[peers],
                outward,
                inward,
                config,
                groups.stage_ranks[own],
                hop.shapes,
            )

    def hook(self, model: list[Any]) -> list[Any]:
        """Megatron's `post_wrap_hook`: whoever has the model finds its boundaries."""
        set_boundaries(get_model_config(model[0]), self.boundaries)
        return model

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


_ATTRIBUTE = "hetero_boundaries"


def set_boundaries(config: Any, boundaries: Mapping[int, Boundary]) -> None:
    """Note a rank's boundaries on a model's configuration, where `boundaries_of` finds them."""
    setattr(config, _ATTRIBUTE, boundaries)


def boundaries_of(config: Any) -> Mapping[int, Boundary]:
    """Those of this rank, by their place in the chain; none under stock Megatron."""
    found: Mapping[int, Boundary] = getattr(config, _ATTRIBUTE, {})
    return found
