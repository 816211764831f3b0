"""Stage boundaries between unlike tensor-parallel widths: every byte crosses once.

Every rank of the sending stage stands for a part of an activation, and so does every rank of the
receiving one (`plan.sharding.stage_ranges`). Where two parts overlap, the overlap goes straight
from its holder to its user, all pieces of a hop in one batched call. A receiving stage without
sequence parallelism then gathers the parts inside its own tensor-parallel group, over its own fast
links. Gradients take the reverse path.

Example: 12 elements go from width 2 (0 to 5, 6 to 11) to width 3 (0 to 3, 4 to 7, 8 to 11). Four
messages cross: sender 0 to receiver 0 (4 elements), 0 to 1 (2), 1 to 1 (2) and 1 to 2 (4).

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
    """This rank's side of one boundary: it sends in one direction and receives in the other.

    Only `take` and `finish_sends` wait.

    Args:
        stage: the ranks of this stage; by default those of the tensor-parallel group.
        peers: the ranks of the neighbouring stage.
        outward: the group of the messages to it.
        inward: the group of the messages from it.
        config: Megatron's configuration of the model.
        shapes: a group of its own for the shapes of activations, which go first where sequences
            have unlike lengths: messages of one group are matched in order, and shapes are awaited
            first.
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
        """Reset the count of messages for a new step."""
        self._num_forgotten = 0

    def send(self, tensor: torch.Tensor, announce: bool = False) -> None:
        """Start sending `tensor`, which is kept until it is known to have arrived.

        With `announce` its shape goes first: the receivers have posted without one.
        """
        ops = self._shape_ops(tensor) if announce else []
        parts = self.send_ops(tensor, self._config.sequence_parallel)
        whole = self._num_elements(tensor.numel(), self._config.sequence_parallel)
        self.traffic.count([op.tensor for op in parts], whole * tensor.element_size())
        ops += parts
        works = [work for group in _by_group(ops) for work in dist.batch_isend_irecv(group)]
        self._sent.append((works, [op.tensor for op in ops]))

    def forget_sends(self, num_arrived: int) -> None:
        """Release the first `num_arrived` sends of this step, which are known to have arrived."""
        while self._num_forgotten < num_arrived:
            works, _ = self._sent.popleft()
            for work in works:
                work.wait()
            self._num_forgotten += 1

    def finish_sends(self) -> None:
        """Wait until everything sent has arrived."""
        self.forget_sends(self._num_forgotten + len(self._sent))

    def post_receive(self, shape: tuple[int, ...] | None) -> None:
        """Make room for the next message, of `shape` on this rank; None: its shape is announced."""
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
        """Return an activation's shape on this rank; raise UsageError if it does not divide."""
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
        """Send the whole shape to the ranks of the next stage that rely on this one for it."""
        whole = self._num_elements(tensor.shape[0], self._config.sequence_parallel)
        told = torch.tensor([whole, tensor.shape[1]], device=torch.cuda.current_device())
        num_tellers = len(self._stage.ranks)
        return [
            dist.P2POp(dist.isend, told, peer, self._shapes)
            for number, peer in enumerate(self._peers.ranks)
            if number % num_tellers == self._index
        ]

    def send_ops(self, tensor: torch.Tensor, sequence_parallel: bool) -> list[dist.P2POp]:
        """Return the sends of `tensor`: all of it, or a sequence-parallel shard."""
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
        """Return the receives of a tensor that has `shape` on this rank, and its `Arrival`."""
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
    """Split messages into batches of one group each."""
    for _, batch in groupby(ops, key=lambda op: id(op.group)):
        yield list(batch)


@dataclass(frozen=True)
class Arrival:
    """A tensor under way; call `finish` after its messages have arrived."""

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
    """A message whose shape is under way; `told` will be (tokens, sequences), whole."""

    works: list[dist.Work]
    told: torch.Tensor


@dataclass(frozen=True)
class _UnderWay:
    works: list[dist.Work]
    arrival: Arrival


class PipelineCommunicator:
    """Value for `pretrain(p2p_communicator=)`, which Megatron's loop hands to the schedule.

    `boundaries` are this rank's, by their place in the chain of model chunks; a replica of a single
    stage has none. The properties answer the questions that Megatron asks its own
    `P2PCommunicator`.
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
        """Store the boundaries on the model's configuration: Megatron's `post_wrap_hook`."""
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
    """Store a rank's boundaries on a model's configuration, where `boundaries_of` finds them."""
    setattr(config, _ATTRIBUTE, boundaries)


def boundaries_of(config: Any) -> Mapping[int, Boundary]:
    """Return this rank's boundaries, by their place in the chain; none under stock Megatron."""
    found: Mapping[int, Boundary] = getattr(config, _ATTRIBUTE, {})
    return found
