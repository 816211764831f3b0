"""Timelines of the GPUs of a stage, and of the paths of the cluster, over a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from megatron_hetero.cost.memory.stage import StageMemory
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica
from megatron_hetero.schedule.parts import OpSpan, Pipeline, Run, StageId
from megatron_hetero.schedule.simulator.pipeline import computing_s, peak_in_flight


@dataclass(frozen=True)
class StageTimeline:
    """Timeline of the GPUs of one stage; all of them do the same.

    `memory` is [(time_s, bytes)] on its fullest GPU, from 0 on: what is kept until the next entry.
    `device_peak_bytes` has the peak of each GPU; `capacity_bytes` is the fullest one's, and
    `reserve_bytes` what the plan leaves free there, which `memory` counts.
    """

    replica: int
    stage: int
    devices: tuple[str, ...]
    operations: tuple[OpSpan, ...]
    memory: tuple[tuple[float, int], ...]
    capacity_bytes: int
    device_peak_bytes: tuple[int, ...] = ()
    reserve_bytes: int = 0

    @cached_property
    def busy_s(self) -> float:
        """Sum the seconds of computing: forward, backward and the optimizer."""
        return computing_s(self.operations) + sum(
            o.end_s - o.start_s for o in self.operations if o.kind == "step"
        )

    @cached_property
    def compute_end_s(self) -> float:
        """Return when its last backward pass ends."""
        return max((o.end_s for o in self.operations if o.micro_batch >= 0), default=0.0)

    @property
    def peak_in_flight(self) -> int:
        """Count the most micro-batches (of any chunk) kept for their backward pass."""
        return peak_in_flight(self.operations)

    @property
    def peak_memory_bytes(self) -> int:
        """Return the most bytes held on the stage's fullest GPU at any time of the step, with the
        reserve."""
        return max(held for _, held in self.memory)

    @property
    def used_bytes(self) -> int:
        """Return the same without what is left free."""
        return self.peak_memory_bytes - self.reserve_bytes

    @property
    def lacking_bytes(self) -> int:
        """Return the bytes that the fullest GPU lacks, with the reserve; 0 where the stage fits."""
        return max(0, self.peak_memory_bytes - self.capacity_bytes)


@dataclass(frozen=True)
class LinkTimeline:
    """A path of the cluster in one direction, `a -> b` between nodes, `a:0 out` inside a node; or a
    line shared by paths."""

    name: str
    busy_s: float
    num_messages: int
    num_bytes: float


def stage_timeline(
    costs: CostModel,
    replica: PlacedReplica,
    place: StageId,
    rows: int,
    spans: Sequence[OpSpan],
    chunk_layers: Sequence[int],
) -> StageTimeline:
    """Build the timeline of a stage, with the memory of its GPUs.

    Args:
        costs: the price list, sharded as the placement.
        replica: the placed replica of the stage.
        place: (replica, stage).
        rows: rows of the padded vocabulary.
        spans: the stage's operations, in order.
        chunk_layers: layers of each of its chunks.
    """
    index = place[1]
    stage = replica.stages[index]
    found = []
    # What one micro-batch keeps on each device: the difference between two in flight and one.
    one, two = (
        costs.stage_memories(_with_in_flight(replica, count), index, rows) for count in (1, 2)
    )
    # The head follows the last chunk alone; of a single chunk nothing has to be told apart.
    heads: Sequence[int] = [0] * len(stage.devices)
    if len(chunk_layers) > 1:
        heads = _head_bytes(costs, replica, index, rows)
    # Bytes of the GPU's own timeline: what is always held, plus each chunk's part of a micro-batch.
    memories = costs.stage_memories(replica, index, rows)
    for low, high, memory, head in zip(one, two, memories, heads, strict=True):
        kept = _activations(high, stage.num_layers) - _activations(low, stage.num_layers)
        held = memory.training_bytes(stage.num_layers) - replica.num_in_flight[index] * kept
        by_chunk = [(kept - head) * layers // stage.num_layers for layers in chunk_layers]
        by_chunk[-1] += head
        timeline = tuple(_memory(held, by_chunk, spans))
        # The update may need more than the passes, where it copies weights.
        peak = max(held for _, held in timeline)
        if memory.has_copies:
            peak = max(peak, memory.updating_bytes(stage.num_layers))
        found.append((peak, memory.capacity_bytes, timeline, memory.base["reserve"]))
    # The fullest GPU stands for the stage.
    _, capacity_bytes, timeline, reserve = max(found, key=lambda f: f[0] / f[1])
    return StageTimeline(
        *place,
        tuple(device.name for device in stage.devices),
        tuple(sorted(spans, key=lambda span: span.start_s)),
        timeline,
        capacity_bytes,
        tuple(peak for peak, *_ in found),
        reserve,
    )


def _head_bytes(
    costs: CostModel, replica: PlacedReplica, index: int, rows: int
) -> Sequence[int]:
    """Return what each GPU of a last stage keeps of a micro-batch's head; 0 on other stages, and on
    a stage that has the embedding as well."""
    if index == 0 or index != len(replica.stages) - 1:
        return [0] * len(replica.stages[index].devices)
    ends = costs.stage_memories(_with_in_flight(replica, 1), index, rows, of_ends=True)
    return [memory.base["activations"] for memory in ends]


def _memory(held: int, kept: Sequence[int], spans: Sequence[OpSpan]) -> Iterator[tuple[float, int]]:
    """Yield the bytes kept over the whole step: the activations of every micro-batch on every chunk
    count from its forward to the end of its backward pass."""
    # A new entry at each forward's begin and each backward's end.
    yield 0.0, held
    for span in spans:
        if span.kind == "forward":
            held += kept[span.chunk]
            yield span.start_s, held
        elif span.kind in ("backward", "backward_weight"):
            held -= kept[span.chunk]
            yield span.end_s, held


def _with_in_flight(replica: PlacedReplica, count: int) -> PlacedReplica:
    """Return the same replica when every stage keeps `count` micro-batches."""
    counts = (count,) * len(replica.stages)
    return replace(replica, num_micro_batches=count, launch_counts=counts)


def _activations(memory: StageMemory, num_layers: int) -> int:
    return memory.parts_bytes(num_layers)["activations"]


def link_timelines(pipelines: Sequence[Pipeline], run: Run) -> Iterator[LinkTimeline]:
    """Yield every path that something took, in alphabetical order."""
    # Messages by the boundary of their chunk; forward ones cross the boundary behind it.
    count: dict[str, int] = dict.fromkeys(run.path_busy_s, 0)
    carried: dict[str, float] = dict.fromkeys(run.path_busy_s, 0.0)
    for message in run.messages:
        pipeline = pipelines[message.pipeline]
        is_forward = message.operation.kind == "send_forward"
        chunk_place = pipeline.schedule.virtual_stage(message.sender, message.operation.chunk)
        crossed = pipeline.forward if is_forward else pipeline.backward
        taken = crossed[chunk_place if is_forward else chunk_place - 1]
        for path, _ in taken.hops:
            count[path] += 1
            carried[path] += taken.num_bytes
    # Collectives add bytes, and no messages.
    for collective, _, _ in run.collectives:
        for (path, _), num_bytes in zip(collective.hops, collective.hop_bytes, strict=True):
            carried[path] += num_bytes
    for path in sorted(run.path_busy_s):
        yield LinkTimeline(path, run.path_busy_s[path], count[path], carried[path])
