"""Programmes of pipeline stages as data: every computation and message, in order.

A programme is a sequence of instructions; an instruction is a tuple of operations that are posted
together (a lone computation, a lone message, or the fused send and receive of stock 1F1B) and ends
when all of them have ended.

A stage is a group of devices.  It holds one model chunk, or several, and the chunks of all stages
in the order of their layers are the *chain* of virtual stages; boundary b lies between the virtual
stages b and b + 1 (Megatron's interleaved schedule, arXiv 2104.04473, sec. 2.2, with any number of
chunks on any stage).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from megatron_hetero.errors import PlanFormatError

OperationKind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_forward",
    "recv_forward",
    "send_backward",
    "recv_backward",
    "gradient_sync",
    "step",
    "weight_sync",
]
BACKWARDS = ("backward", "backward_input", "backward_weight")
COMPUTE = ("forward", *BACKWARDS)
SENDS = ("send_forward", "send_backward")
RECEIVES = ("recv_forward", "recv_backward")
_MESSAGES: Mapping[OperationKind, tuple[bool, bool]] = {
    "send_forward": (True, True),
    "recv_forward": (True, False),
    "send_backward": (False, False),
    "recv_backward": (False, True),
}
"""Pairs (goes forward, crosses the boundary behind the stage's chunk) of each message."""


class Operation(NamedTuple):
    """One action of a stage.

    `backward` is a whole backward pass; `backward_input` and, later, `backward_weight` are its two
    parts (zero bubble, arXiv 2401.10241: B and W).  `micro_batch` is -1 for the operations of the
    whole batch: gradient_sync, step, and in timelines weight_sync, the exchange of new weights that
    is part of the distributed optimizer's step.  `chunk` counts the model chunks of the stage.
    """

    kind: OperationKind
    micro_batch: int = -1
    chunk: int = 0

    def __str__(self) -> str:
        if self.micro_batch < 0:
            return self.kind
        chunk = f", chunk {self.chunk}" if self.chunk else ""
        return f"{self.kind}({self.micro_batch}{chunk})"


Instruction = tuple[Operation, ...]
Programme = tuple[Instruction, ...]


class Message(NamedTuple):
    """The content of a send and its receive.  (boundary, is_forward) is a channel, on which
    messages arrive in the order in which they were sent."""

    boundary: int
    is_forward: bool
    micro_batch: int


@dataclass(frozen=True)
class Schedule:
    """The programmes of one replica's stages, shape [stage].

    `chain`: [virtual stage] -> stage; empty stands for one chunk on each stage.
    """

    programmes: tuple[Programme, ...]
    num_micro_batches: int
    chain: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.chain:
            object.__setattr__(self, "chain", tuple(range(len(self.programmes))))

    @property
    def num_stages(self) -> int:
        """Return the length of the pipeline."""
        return len(self.programmes)

    def num_chunks(self, stage: int) -> int:
        """Count the model chunks of a stage."""
        return len(self._virtual_stages[stage])

    def virtual_stage(self, stage: int, chunk: int) -> int:
        """Return the place in the chain of a stage's chunk."""
        return self._virtual_stages[stage][chunk]

    def place(self, virtual_stage: int) -> tuple[int, int]:
        """Return (stage, chunk) of a place in the chain."""
        stage = self.chain[virtual_stage]
        return stage, self._virtual_stages[stage].index(virtual_stage)

    @cached_property
    def messages(self) -> tuple[tuple[tuple[tuple[Message, ...], tuple[Message, ...]], ...], ...]:
        """The messages that each instruction sends, and those that it receives,
        [stage][instruction]."""
        return tuple(
            tuple(
                (
                    tuple([self.message(stage, o) for o in instruction if o.kind in SENDS]),
                    tuple([self.message(stage, o) for o in instruction if o.kind in RECEIVES]),
                )
                for instruction in programme
            )
            for stage, programme in enumerate(self.programmes)
        )

    def message(self, stage: int, operation: Operation) -> Message:
        """Return the message of a send or a receive of `stage`; equal on both sides."""
        is_forward, _ = _MESSAGES[operation.kind]
        return Message(self.boundary(stage, operation), is_forward, operation.micro_batch)

    def boundary(self, stage: int, operation: Operation) -> int:
        """Return the boundary that a send or a receive of `stage` crosses."""
        _, is_after = _MESSAGES[operation.kind]
        here = self._virtual_stages[stage][operation.chunk]
        return here if is_after else here - 1

    @cached_property
    def _virtual_stages(self) -> tuple[tuple[int, ...], ...]:
        """Return the places in the chain, [stage][chunk]."""
        places: list[list[int]] = [[] for _ in self.programmes]
        for place, stage in enumerate(self.chain):
            places[stage].append(place)
        return tuple(tuple(p) for p in places)


def build_schedule(
    orders: Sequence[Sequence[Operation]], num_micro_batches: int, chain: Sequence[int] = ()
) -> Schedule:
    """Complete the order of every stage's computations with their messages.

    A receive comes right before the computation that needs it and a send right after the one that
    made it.  A send followed by a receive over the same boundary is one instruction, as in stock
    1F1B.

    Args:
        orders: computations of each stage, shape [stage].
        chain: as `Schedule.chain`.
    Raises:
        PlanFormatError: a chain that no pipeline has.
    """
    # The frame knows boundaries and virtual stages before there are programmes.
    frame = Schedule(tuple(() for _ in orders), num_micro_batches, tuple(chain))
    _check_chain(frame.chain, len(orders))
    last = len(frame.chain) - 1
    programmes = []
    for stage, order in enumerate(orders):
        programme: list[Instruction] = []
        for work in order:
            # Receive first: the input of a forward, or the gradient of a backward.
            k, chunk, here = work.micro_batch, work.chunk, frame.virtual_stage(stage, work.chunk)
            message: Operation | None = None
            if work.kind == "forward" and here > 0:
                message = Operation("recv_forward", k, chunk)
            elif work.kind in ("backward", "backward_input") and here < last:
                message = Operation("recv_backward", k, chunk)
            # A send and a receive over one boundary become one instruction (Megatron's
            # send_forward_recv_backward).
            if message is not None:
                if programme and _same_boundary(frame, stage, programme[-1], message):
                    programme[-1] = (*programme[-1], message)
                else:
                    programme.append((message,))
            programme.append((work,))
            # Send last: what the pass made, unless the chain ends here.
            if work.kind == "forward" and here < last:
                programme.append((Operation("send_forward", k, chunk),))
            elif work.kind in ("backward", "backward_input") and here > 0:
                programme.append((Operation("send_backward", k, chunk),))
        # The tail of every programme: the exchange of gradients, then the optimizer.
        programme.append((Operation("gradient_sync"),))
        programme.append((Operation("step"),))
        programmes.append(tuple(programme))
    return Schedule(tuple(programmes), num_micro_batches, frame.chain)


def _same_boundary(
    schedule: Schedule, stage: int, instruction: Instruction, receive: Operation
) -> bool:
    if len(instruction) > 1 or instruction[0].kind not in SENDS:
        return False
    return schedule.boundary(stage, instruction[0]) == schedule.boundary(stage, receive)


def _check_chain(chain: Sequence[int], num_stages: int) -> None:
    steps_on = all(a != b for a, b in pairwise(chain))
    if set(chain) != set(range(num_stages)) or not steps_on:
        raise PlanFormatError(
            f"the chain of model chunks {tuple(chain)} does not suit {num_stages} stages: every "
            "stage must be in it, and neighbours must be on different stages"
        )
