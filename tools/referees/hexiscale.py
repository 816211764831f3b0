"""HexiScale's released cost model (Relaxed-System-Lab/FlashFlex at 5ee1726), defects included.

B = 2 bytes an element, S = 4096, V = 32000; TFLOPS count 1024^4, GB/s and GB count 1024^3.  No
latency, one bandwidth between any two machines, no overlap, and memory that does not depend on the
micro-batches in flight.  Only sums of its formulas are rearranged here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

ELEMENT_BYTES = 2
SEQ_LENGTH = 4096
VOCAB_SIZE = 32000
RECOMPUTE = True
"""The released default; without it layers cost 72 instead of 96 and TP 8 instead of 12."""
NOT_EXPRESSIBLE_S = 1e6
PIPELINE_FACTOR = 1.8
SYNC_FACTOR = 1.1


@dataclass(frozen=True)
class DeviceType:
    """A row of the released table."""

    tflops: float
    memory_gb: float
    inside_gb_per_s: float

    @property
    def flops_per_s(self) -> float:
        return self.tflops * 1024**4

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gb * 1024**3)

    @property
    def inside_bytes_per_s(self) -> float:
        return self.inside_gb_per_s * 1024**3


DEVICE_TYPES = {
    "A4000": DeviceType(76.7, 24, 64),
    "A5000": DeviceType(111.1, 24, 64),
    "A6000": DeviceType(154.8, 48, 64),
    "L40": DeviceType(181, 48, 64),
    "A100": DeviceType(312, 80, 200),
    "H100": DeviceType(1513, 80, 128),
    "H100-4": DeviceType(1513, 80, 400),
    "A10": DeviceType(250, 24, 32),
    "L4": DeviceType(242, 24, 32),
    "3080Ti": DeviceType(56.9, 12, 20),
    "3090": DeviceType(80, 24, 2),
    "4090": DeviceType(165.2, 24, 2),
    "4090-4": DeviceType(165.2, 24, 20),
    "T4S": DeviceType(65, 16, 32),
    "T4A": DeviceType(65, 8, 32),
}
"""As shipped, odd rows included: constants of the referee, never defaults of ours."""


@dataclass(frozen=True)
class Shape:
    """What the cost model knows of a model."""

    hidden_size: int
    num_layers: int


MODELS = {
    "7B": Shape(4096, 32),
    "13B": Shape(5120, 40),
    "30B": Shape(6656, 60),
    "70B": Shape(8192, 80),
}


class Gpu(NamedTuple):
    """One GPU: its machine, its number there, its type."""

    machine: str
    number: int
    device_type: DeviceType


Group = tuple[Gpu, ...]
"""The GPUs of one stage; the first one's speed counts for all."""


@dataclass(frozen=True)
class Stage:
    """`num_layers` layers on one tensor-parallel group."""

    group: Group
    num_layers: int


@dataclass(frozen=True)
class Pipeline:
    """One data-parallel copy and its micro-batches of a step."""

    stages: tuple[Stage, ...]
    num_micro_batches: int


class Hexiscale:
    """The cost model for one model, bandwidth between machines and micro-batch size."""

    def __init__(self, shape: Shape, between_bytes_per_s: float, micro_batch_size: int = 1) -> None:
        self.shape = shape
        self.between_bytes_per_s = between_bytes_per_s
        self.micro_batch_size = micro_batch_size

    @property
    def message_bytes(self) -> float:
        """b S H B: the activation of one micro-batch."""
        return self.micro_batch_size * SEQ_LENGTH * self.shape.hidden_size * ELEMENT_BYTES

    def bandwidth(self, one: Gpu, other: Gpu) -> float:
        """Bytes a second between two GPUs."""
        if one.machine == other.machine:
            return one.device_type.inside_bytes_per_s
        return self.between_bytes_per_s

    def layer_compute_s(self, device_type: DeviceType, width: int) -> float:
        """Forward and backward of one layer, head and embedding smeared over the layers."""
        h, layers = self.shape.hidden_size, self.shape.num_layers
        factor = 96 if RECOMPUTE else 72
        ends = 1 + SEQ_LENGTH / (6 * h) + VOCAB_SIZE / (16 * layers * h)
        flops = factor * self.micro_batch_size * SEQ_LENGTH * h**2 * ends
        return flops / (device_type.flops_per_s * width)

    def layer_communication_s(self, group: Group) -> float:
        """Tensor-parallel messages of one layer."""
        factor = 12 if RECOMPUTE else 8
        each = self.message_bytes / len(group)
        return factor * max(
            sum(each / self.bandwidth(i, j) for j in group if j != i) for i in group
        )

    def boundary_s(self, senders: Group, receivers: Group) -> float:
        """One boundary, both directions: one message, then a broadcast by its receiver."""
        each = self.message_bytes / len(receivers)
        return 2 * min(
            self.message_bytes / self.bandwidth(i, j)
            + sum(each / self.bandwidth(j, r) for r in receivers if r != j)
            for i in senders
            for j in receivers
        )

    def cells_s(self, stages: Sequence[Stage]) -> list[float]:
        """What each stage takes for a micro-batch, its boundary to the next stage included."""
        cells = []
        for index, stage in enumerate(stages):
            layer_s = self.layer_compute_s(stage.group[0].device_type, len(stage.group))
            layer_s += self.layer_communication_s(stage.group)
            cells.append(stage.num_layers * layer_s)
            if index + 1 < len(stages):
                cells[-1] += self.boundary_s(stage.group, stages[index + 1].group)
        return cells

    def sync_s(self, pipelines: Sequence[Pipeline]) -> float:
        """Gradient exchange: every layer of every matched group, one after the other."""
        if len(pipelines) == 1:
            return 0.0
        return sum(
            num_layers * self.layer_sync_s(groups) for num_layers, groups in layer_runs(pipelines)
        )

    def layer_sync_s(self, groups: Sequence[Group]) -> float:
        """Exchange of one layer among its holders, one group of each pipeline.

        `NOT_EXPRESSIBLE_S` for widths, as 1, 2 and 5, whose repetition leaves some rank without a
        partner: the released code fails there.
        """
        widths = [len(group) for group in groups]
        narrowest, widest = min(widths), max(widths)
        total_s = 0.0
        if any(widest // narrowest > widest // width * width for width in widths):
            return NOT_EXPRESSIBLE_S
        for rank in range(widest // narrowest):
            # A narrow group stands for a wide one by repeating each of its GPUs.
            matched = [group[rank // (widest // len(group))] for group in groups]
            on_machine = Counter(gpu.machine for gpu in matched)
            slowest_s = max(
                (on_machine[gpu.machine] - 1) / gpu.device_type.inside_bytes_per_s
                + (len(matched) - on_machine[gpu.machine]) / self.between_bytes_per_s
                for gpu in matched
            )
            layer_bytes = 12 * self.shape.hidden_size**2 * ELEMENT_BYTES
            total_s += 2 * layer_bytes / (narrowest * len(matched)) * slowest_s
        return total_s

    def step_s(self, pipelines: Sequence[Pipeline]) -> float:
        """Seconds of a step."""
        slowest_s = max(columns_s(self.cells_s(p.stages), p.num_micro_batches) for p in pipelines)
        return PIPELINE_FACTOR * slowest_s + SYNC_FACTOR * self.sync_s(pipelines)

    def memory_bytes(self, num_layers: int, width: int, first: bool, last: bool) -> float:
        """Peak bytes on each GPU of a stage; the ends of the model are not divided by the width."""
        h = self.shape.hidden_size
        params = num_layers * 12 * h**2 / width
        params += (h * VOCAB_SIZE + h * SEQ_LENGTH) if first else 0
        params += (h + h * VOCAB_SIZE) if last else 0
        activations = self.message_bytes * (num_layers / width + 2)
        return 4 * ELEMENT_BYTES * params + activations

    def missing_bytes(self, pipelines: Sequence[Pipeline]) -> float:
        """Most bytes that any GPU lacks; zero or less where the plan fits."""
        return max(
            self.memory_bytes(
                stage.num_layers, len(stage.group), s == 0, s == len(pipeline.stages) - 1
            )
            - min(gpu.device_type.memory_bytes for gpu in stage.group)
            for pipeline in pipelines
            for s, stage in enumerate(pipeline.stages)
        )


def columns_s(cells_s: Sequence[float], num_micro_batches: int) -> float:
    """A GPipe diagram column by column, each as long as its slowest busy stage.

    Stage s is busy in columns s to s + num_micro_batches - 1.
    """
    num_stages = len(cells_s)
    if num_micro_batches < num_stages:
        columns = range(num_micro_batches + num_stages - 1)
        return sum(
            max(cells_s[max(0, c - num_micro_batches + 1) : min(num_stages, c + 1)])
            for c in columns
        )
    head_s = tail_s = slowest_s = 0.0
    for cell_s in cells_s[:-1]:
        slowest_s = max(slowest_s, cell_s)
        head_s += slowest_s
    slowest_s = 0.0
    for cell_s in reversed(cells_s[1:]):
        slowest_s = max(slowest_s, cell_s)
        tail_s += slowest_s
    return head_s + tail_s + (num_micro_batches - num_stages + 1) * max(cells_s)


def layer_runs(pipelines: Sequence[Pipeline]) -> Iterator[tuple[int, tuple[Group, ...]]]:
    """Runs of layers with the same holders: (layers, one group of each pipeline)."""
    ends = []
    for pipeline in pipelines:
        reached, mine = 0, []
        for stage in pipeline.stages:
            reached += stage.num_layers
            mine.append(reached)
        ends.append(mine)
    at = [0] * len(pipelines)
    for first, end in pairwise(sorted({0, *(e for mine in ends for e in mine)})):
        for p, mine in enumerate(ends):
            while mine[at[p]] <= first:
                at[p] += 1
        yield (
            end - first,
            tuple(pipeline.stages[s].group for pipeline, s in zip(pipelines, at, strict=True)),
        )
