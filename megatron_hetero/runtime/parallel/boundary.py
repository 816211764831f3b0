"""Stage boundaries between unlike tensor-parallel widths: every byte crosses once.

Every rank of the sending stage stands for a part of an activation, and so does every rank of the
receiving one (`plan.sharding.stage_ranges`). Where two parts overlap, the overlap goes straight
from its holder to its user, all pieces of a hop in one batched call. A receiving stage without
sequence parallelism then gathers the parts inside its own tensor-parallel group, over its own fast
links. Gradients take the reverse path.

Example: 12 elements go from width 2 (0 to 5, 6 to 11) to width 3 (0 to 3, 4 to 7, 8 to 11). Four
messages cross: sender 0 to receiver 0 (4 elements), 0 to 1 (2), 1 to 1 (2) and 1 to 2 (4).

Megatron's own bridge and HexiScale send everything to a leader and broadcast it; the link between
the stages then carries the same bytes, but through one pair of devices.  Over gloo that is what
small messages do here too: a broadcast there takes less time than a gather
(`pipeline.LED_BELOW_BYTES`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from megatron_hetero.errors import UsageError
from megatron_hetero.plan.sharding.stage_ranges import Piece, StageRanks, flat_range, pieces
from megatron_hetero.runtime.faults.unfinished import wait_for
from megatron_hetero.runtime.parallel.arrivals import Announced, Arrival, UnderWay, by_group
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.traffic import BoundaryTraffic


class Boundary:
    """This rank's side of one boundary: it sends in one direction and receives in the other.

    Args:
        stage: the ranks of this stage; by default those of the tensor-parallel group.
        peers: the ranks of the neighbouring stage.
        outward, inward: the groups of the messages to and from it, which these use in turn.
        config: the model's.
        shapes: groups for the shapes of activations, which go ahead of them where sequences have
            unlike lengths (`config.variable_seq_lengths`).  Groups of their own, because a
            transport matches the messages of one group in order, and shapes are waited for first.
        led_below: bytes of an activation, below which it goes from leader to leader where the
            receivers would gather it; equal on both sides.
        crossing: what crosses, where the two stages compute in unlike precisions: that of the
            narrower side. The other side casts, before it sends and after it has received.

    Nothing here waits but `take` and `finish_sends`.
    """

    def __init__(
        self,
        groups: RankGroups,
        peers: StageRanks,
        outward: Sequence[dist.ProcessGroup],
        inward: Sequence[dist.ProcessGroup],
        config: Any,
        stage: StageRanks | None = None,
        shapes: Sequence[dist.ProcessGroup] = (),
        led_below: int = 0,
        crossing: torch.dtype | None = None,
    ) -> None:
        self._groups = groups
        self._crossing = crossing or config.pipeline_dtype
        self._outward, self._inward, self._shapes = outward, inward, shapes
        self._config = config
        self._led_below = led_below
        self._width = groups.tensor.size()
        self._peers = peers
        self._stage = stage or StageRanks(tuple(range(self._width)))
        # Place among all ranks of the stage, which context parallelism makes several groups.
        self._index = groups.tensor.rank()
        if stage is not None and len(stage.ranks) > self._width:
            self._index = stage.ranks.index(dist.get_rank())
        # Sends under way, the oldest first, with the operations, which keep the tensors alive.
        self._sent: deque[tuple[list[dist.Work], list[dist.P2POp]]] = deque()
        # Counted within a step: sends, receives with a tensor, receives of shapes, sends released.
        self._num_sent = self._num_asked = self._num_posted = self._num_forgotten = 0
        self.traffic = BoundaryTraffic()
        self._posted: deque[Announced | UnderWay] = deque()

    def begin(self) -> None:
        """Reset the counts of messages for a new step."""
        self._num_sent = self._num_asked = self._num_posted = self._num_forgotten = 0

    def send(self, tensor: torch.Tensor, announce: bool = False) -> None:
        """Start sending `tensor`; keep the tensor until the arrival is known.

        With `announce` its shape goes first: the receivers have posted without one.
        """
        tensor = tensor.to(self._crossing)
        ops = self._shape_ops(tensor) if announce else []
        # `whole` counts the elements of the activation on all ranks of the stage together.
        parts = self.send_ops(tensor, self._config.sequence_parallel)
        whole = self._num_elements(tensor.numel(), self._config.sequence_parallel)
        self.traffic.count([op.tensor for op in parts], whole * tensor.element_size())
        ops += parts
        # torch takes one group in a batched call; shapes have groups of their own.
        works = [work for group in by_group(ops) for work in dist.batch_isend_irecv(group)]
        # The operations keep their tensors.
        self._sent.append((works, ops))
        self._num_sent += 1

    def forget_sends(self, num_arrived: int) -> None:
        """Release the first `num_arrived` sends of this step, which are known to have arrived."""
        while self._num_forgotten < num_arrived:
            wait_for(*self._sent.popleft())
            self._num_forgotten += 1

    def finish_sends(self) -> None:
        """Wait until everything sent has arrived."""
        self.forget_sends(self._num_forgotten + len(self._sent))

    def post_receive(self, shape: tuple[int, ...] | None) -> None:
        """Make room for the next message, of `shape` on this rank; None: its shape is announced."""
        if shape is not None:
            self._posted.append(self._receive(shape))
            return
        # The shape of the whole activation: [sequence, batch].
        told = torch.empty(2, dtype=torch.int64, device=torch.cuda.current_device())
        # The rank of the other stage that tells this rank, by the rule of `_shape_ops`.
        peer = self._peers.ranks[self._index % len(self._peers.ranks)]
        group = _in_turn(self._shapes, self._num_posted)
        self._num_posted += 1
        messages = [dist.P2POp(dist.irecv, told, peer, group)]
        self._posted.append(Announced(dist.batch_isend_irecv(messages), told, messages))

    def ask_for_announced(self) -> None:
        """Make room for the messages whose shapes have arrived."""
        self._ask(lambda place, works: all(work.is_completed() for work in works))

    def take(self) -> torch.Tensor:
        """Wait for the oldest message that was posted for."""
        # The oldest shape is needed now; later ones are used as far as they have arrived.
        self._ask(lambda place, works: place == 0 or all(work.is_completed() for work in works))
        under_way = self._posted.popleft()
        if not isinstance(under_way, UnderWay):
            raise RuntimeError("a message was taken whose shape has not arrived")
        wait_for(under_way.works, under_way.messages)
        return under_way.arrival.finish()

    def _ask(self, is_due: Callable[[int, list[dist.Work]], bool]) -> None:
        """Post for announced messages, in order, as far as they are due."""
        for place, posted in enumerate(self._posted):
            if isinstance(posted, UnderWay):
                continue
            # A transport matches the messages of a group in order: no receive may overtake another.
            if not is_due(place, posted.works):
                return
            wait_for(posted.works, posted.messages)
            self._posted[place] = self._receive(self._own_shape(*posted.told.tolist()))

    def _own_shape(self, sequence: int, batch: int) -> tuple[int, ...]:
        """Return an activation's shape on this rank; raise UsageError if it does not divide."""
        # With unlike shares no shape is announced (`checks.support.check_context_parallel`).
        parts = self._stage.context * (self._width if self._config.sequence_parallel else 1)
        # Megatron gives each context-parallel rank two chunks of a sequence.
        must_divide = parts * (2 if self._stage.context > 1 else 1)
        if sequence % must_divide:
            raise UsageError(
                f"a micro-batch has a sequence of {sequence} tokens, which a stage of "
                f"tensor-parallel width {self._width} and context parallelism "
                f"{self._stage.context} cannot divide: it must be a multiple of {must_divide}. "
                "Pad the micro-batch in the script's forward step."
            )
        return sequence // parts, batch, self._config.hidden_size

    def _receive(self, shape: tuple[int, ...]) -> UnderWay:
        ops, arrival = self.receive_ops(shape, self._crossing, self._config.sequence_parallel)
        self._num_asked += 1
        works = dist.batch_isend_irecv(ops) if ops else []
        # What has arrived is cast to this stage's precision.
        return UnderWay(works, replace(arrival, dtype=self._config.pipeline_dtype), ops)

    def _num_elements(self, on_this_rank: int, sequence_parallel: bool) -> int:
        # Under sequence parallelism a rank has one of `width` parts of its group's tokens.
        own = on_this_rank * (self._width if sequence_parallel else 1)
        return self._stage.whole(own, self._context_rank)

    @property
    def _context_rank(self) -> int:
        return self._index // self._width

    def _shape_ops(self, tensor: torch.Tensor) -> list[dist.P2POp]:
        """Send the whole shape to the next stage's ranks that rely on this rank."""
        whole = self._num_elements(tensor.shape[0], self._config.sequence_parallel)
        told = torch.tensor([whole, tensor.shape[1]], device=torch.cuda.current_device())
        num_tellers, group = len(self._stage.ranks), _in_turn(self._shapes, self._num_sent)
        return [
            dist.P2POp(dist.isend, told, peer, group)
            for number, peer in enumerate(self._peers.ranks)
            if number % num_tellers == self._index
        ]

    def send_ops(self, tensor: torch.Tensor, sequence_parallel: bool) -> list[dist.P2POp]:
        """Return the sends of `tensor`: all of it, or a sequence-parallel shard."""
        flat = tensor.detach().contiguous().view(-1)
        num_elements = self._num_elements(flat.numel(), sequence_parallel)
        if self._is_led(num_elements * flat.element_size(), self._peers.width):
            found = self._led_pieces(num_elements)
        else:
            found = pieces(num_elements, self._stage, self._index, self._peers)
            # Every rank of the group has the whole activation: each sends a part of its own.
            if not sequence_parallel:
                start, stop = flat_range(flat.numel(), self._width, self._groups.tensor.rank())
                flat = flat[start:stop]
        group = _in_turn(self._outward, self._num_sent)
        return [dist.P2POp(dist.isend, flat[p.own], p.peer, group) for p in found]

    def receive_ops(
        self, shape: tuple[int, ...], dtype: torch.dtype, sequence_parallel: bool
    ) -> tuple[list[dist.P2POp], Arrival]:
        """Return the receives of a tensor with `shape` on this rank, and the `Arrival`."""
        num_elements = self._num_elements(prod(shape), sequence_parallel)
        is_led = self._is_led(num_elements * dtype.itemsize, self._width)
        size = self._stage.own_part(num_elements, self._context_rank)
        if is_led:
            found = self._led_pieces(num_elements)
        else:
            size = flat_range(size, self._width, 0)[1]
            found = pieces(num_elements, self._stage, self._index, self._peers)
        own = torch.empty(size, dtype=dtype, device=torch.cuda.current_device())
        group = _in_turn(self._inward, self._num_asked)
        ops = [dist.P2POp(dist.irecv, own[p.own], p.peer, group) for p in found]
        whole = not sequence_parallel and self._width > 1
        return ops, Arrival(own, shape, self._groups.tensor if whole else None, is_led)

    def _is_led(self, num_bytes: int, receiving_width: int) -> bool:
        return receiving_width > 1 and num_bytes < self._led_below

    def _led_pieces(self, num_elements: int) -> tuple[Piece, ...]:
        """Return the pieces exchanged by the first rank of a tensor-parallel group for the whole
        group."""
        if self._groups.tensor.rank() != 0:
            return ()
        return pieces(num_elements, self._stage.leaders, self._context_rank, self._peers.leaders)


def _in_turn(groups: Sequence[dist.ProcessGroup], number: int) -> dist.ProcessGroup:
    """Return the group of message `number` of a step."""
    return groups[number % len(groups)]
