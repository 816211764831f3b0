"""Input and output of the simulator: times, crossings, collectives, spans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from megatron_hetero.hashed import value
from megatron_hetero.schedule.programme import Operation, OperationKind, Schedule

SendMode = Literal["buffered", "waited", "rendezvous", "overlapped"]
"""Behaviour of a sender after a send: it goes on, as our runtime does, or waits until the message
has arrived and its receiver has asked for it, as stock Megatron's 1F1B does.  With rendezvous it
waits so for messages above `EAGER_BYTES` alone.  Stock Megatron's interleaved stages overlap some
of their messages (`schedule.simulator.overlapped`)."""

EAGER_BYTES = 4 << 20
"""Largest message that leaves its sender before the receiver asks for it: NCCL's buffer of a
channel, into which a sender writes ahead (`NCCL_BUFFSIZE`, 4 MiB by default)."""

StageId = tuple[int, int]
"""(pipeline, stage)."""


@dataclass(frozen=True)
class ChunkTimes:
    """Seconds of a micro-batch on a model chunk of a stage.

    `backward_weight_s` is the part of the backward pass that makes weight gradients; it is a pass
    of its own in zero-bubble schedules.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float = 0.0

    def slower(self, factor: float) -> ChunkTimes:
        """Return the same times, `factor` times as long."""
        return ChunkTimes(
            factor * self.forward_s,
            factor * self.backward_input_s,
            factor * self.backward_weight_s,
        )

    def seconds(self, kind: OperationKind) -> float:
        """Return the duration of one computation."""
        # Messages and exchanges have no duration of their own here.
        match kind:
            case "forward":
                return self.forward_s
            case "backward":
                return self.backward_input_s + self.backward_weight_s
            case "backward_input":
                return self.backward_input_s
            case "backward_weight":
                return self.backward_weight_s
        raise ValueError(f"{kind} is no computation")


@value(frozen=True)
class Crossing:
    """A message over a boundary in one direction; `hops`: (path, seconds for which the path is
    taken).  It is `num_bytes` in all, `piece_bytes` from one GPU to another."""

    hops: tuple[tuple[str, float], ...]
    latency_s: float
    num_bytes: float = 0.0
    piece_bytes: float = 0.0

    @property
    def is_eager(self) -> bool:
        """Return whether it leaves a sender by rendezvous before the receiver asks for it."""
        return self.piece_bytes <= EAGER_BYTES

    @property
    def serialisation_s(self) -> float:
        """Return the seconds from the first byte sent to the last, without queues on the paths."""
        return max(seconds for _, seconds in self.hops)


@dataclass(frozen=True)
class Pipeline:
    """One replica.  `times` is [stage][chunk]; crossings are [boundary of the schedule's chain]."""

    schedule: Schedule
    times: tuple[tuple[ChunkTimes, ...], ...]
    forward: tuple[Crossing, ...]
    backward: tuple[Crossing, ...]
    sends: SendMode = "buffered"


class Final(NamedTuple):
    """The time at which gradients are complete: `early_s` before the last backward pass of a chunk
    ends."""

    chunk: int = 0
    early_s: float = 0.0


class FirstUse(NamedTuple):
    """The time at which new weights are needed: `late_s` after the first forward pass of a chunk
    begins."""

    chunk: int = 0
    late_s: float = 0.0


@dataclass(frozen=True)
class Collective:
    """A collective of all holders: an exchange of gradients, or of new weights.

    A rank comes to its collectives in their order, and without waiting for them: to the next when
    it has come to the one before and its gradients are complete.  That is when its programme is
    done and its sends have arrived, or, where `final` names the holder, earlier.  `places`: the
    ranks of each holder that take part; without, its ranks are one.  `buffers`: the part of each
    rank's room (`cost.sync.room`) that it takes while it is under way; where earlier ones leave too
    little, it waits for the first of them.  Each of `hops` is (path, seconds for which it is
    taken); the holders have the result when the last hop is done and `latency_s` has passed.
    `needed`: new weights travel until their holders' first forward passes need them; without, they
    are waited for after the update.
    """

    name: str
    holders: tuple[StageId, ...]
    hops: tuple[tuple[str, float], ...]
    latency_s: float = 0.0
    hop_bytes: tuple[float, ...] = ()
    """Bytes of all ranks of the holders, over each of `hops`."""
    buffers: Mapping[StageId, float] = field(default_factory=dict)
    final: Mapping[StageId, Final] = field(default_factory=dict)
    places: Mapping[StageId, tuple[int, ...]] = field(default_factory=dict)
    needed: Mapping[StageId, FirstUse] = field(default_factory=dict)

    @property
    def ranks(self) -> list[tuple[StageId, int]]:
        """Return all ranks that take part: stage, and place in it."""
        return [(holder, place) for holder in self.holders for place in self.places_of(holder)]

    def places_of(self, holder: StageId) -> tuple[int, ...]:
        """Return the ranks of a holder."""
        return self.places.get(holder, (0,))


class OpSpan(NamedTuple):
    """A computation of a stage, a `step`, or a part of a collective (`gradient_sync`, after the
    step `weight_sync`)."""

    kind: OperationKind
    micro_batch: int
    chunk: int
    start_s: float
    end_s: float


class MessageSpan(NamedTuple):
    """A message: posted, on its paths from `start_s` to `end_s`, usable at `arrival_s`."""

    pipeline: int
    sender: int
    receiver: int
    operation: Operation
    posted_s: float
    start_s: float
    end_s: float
    arrival_s: float


@dataclass
class Run:
    """The record of a simulation.  Lists by (pipeline, stage) in the order of the pipelines
    given."""

    end_s: float = 0.0
    operations: dict[StageId, list[OpSpan]] = field(default_factory=dict)
    messages: list[MessageSpan] = field(default_factory=list)
    collectives: list[tuple[Collective, float, float]] = field(default_factory=list)
    path_busy_s: dict[str, float] = field(default_factory=dict)
