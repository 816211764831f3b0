"""One optimizer step of a plan on its cluster, simulated: when every GPU and link does what.

The programmes are those that the runtime executes, on the paths of the cluster, which replicas
share.  Computations last as the cost model says (tensor-parallel communication included), messages
as the links are described; after the pipelines come the gradient exchange and the optimizer.

Not modelled: a receiver whose buffers are full, flows that share a path fairly (messages go one
after the other), the host's own time between kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.memory import StageMemory
from megatron_hetero.cost.model import CostModel, ReplicaCost
from megatron_hetero.cost.placement import PlacedReplica, placement_of
from megatron_hetero.cost.profile import Profile
from megatron_hetero.errors import UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.chunk_times import stage_chunk_times
from megatron_hetero.schedule.of_plan import replica_schedule
from megatron_hetero.schedule.programme import Schedule
from megatron_hetero.schedule.simulate import computing_s, peak_in_flight
from megatron_hetero.schedule.simulator_engine import (
    ChunkTimes,
    Collective,
    MessageSpan,
    OpSpan,
    Pipeline,
    Run,
    SendMode,
    StageId,
    run_step,
)
from megatron_hetero.schedule.simulator_network import crossing, gradient_collectives


@dataclass(frozen=True)
class StageTimes:
    """What the GPUs of one stage take: each chunk's passes, and the optimizer once a step."""

    chunks: tuple[ChunkTimes, ...]
    update_s: float


@dataclass(frozen=True)
class StageTimeline:
    """What the GPUs of one stage do; all of them do the same.

    `memory` is [(time_s, bytes)] on its fullest GPU, from 0 on: what is kept until the next entry.
    `device_peak_bytes` has the peak of each GPU, `capacity_bytes` is the fullest one's.
    """

    replica: int
    stage: int
    devices: tuple[str, ...]
    operations: tuple[OpSpan, ...]
    memory: tuple[tuple[float, int], ...]
    capacity_bytes: int
    device_peak_bytes: tuple[int, ...] = ()

    @cached_property
    def busy_s(self) -> float:
        """Seconds of computing: forward, backward and the optimizer."""
        return computing_s(self.operations) + sum(
            o.end_s - o.start_s for o in self.operations if o.kind == "step"
        )

    @cached_property
    def compute_end_s(self) -> float:
        """When its last backward pass ends."""
        return max((o.end_s for o in self.operations if o.micro_batch >= 0), default=0.0)

    @property
    def peak_in_flight(self) -> int:
        """Most micro-batches (of any chunk) kept for their backward pass."""
        return peak_in_flight(self.operations)

    @property
    def peak_memory_bytes(self) -> int:
        """Most bytes in use on its fullest GPU at any time of the step."""
        return max(held for _, held in self.memory)


@dataclass(frozen=True)
class LinkTimeline:
    """A path of the cluster in one direction: `a -> b` between nodes, `a:0 out` inside one."""

    name: str
    busy_s: float
    num_messages: int
    num_bytes: float


@dataclass(frozen=True)
class StepSimulation:
    """A whole step.  `stages` is [replica][stage]; times count from the step's begin."""

    stages: tuple[tuple[StageTimeline, ...], ...]
    messages: tuple[MessageSpan, ...]
    """`pipeline` is the replica; `sender` and `receiver` are stages."""
    collectives: tuple[tuple[Collective, float, float], ...]
    """Gradient exchanges with their start and end; holders are (replica, stage)."""
    links: tuple[LinkTimeline, ...]
    step_time_s: float
    sends: SendMode
    measured: bool
    """Whether every computation's time was measured (profile.json)."""

    @cached_property
    def timelines(self) -> tuple[StageTimeline, ...]:
        """All stages of all replicas in reading order."""
        return tuple(stage for replica in self.stages for stage in replica)

    @property
    def pipelines_s(self) -> float:
        """Until the last backward pass of the last replica ends."""
        return max(stage.compute_end_s for stage in self.timelines)

    @property
    def gradient_sync_s(self) -> float:
        """From then until the last gradient is reduced."""
        ends_s = [end_s for _, _, end_s in self.collectives]
        return max(0.0, max(ends_s, default=0.0) - self.pipelines_s)

    @property
    def bubble(self) -> float:
        """Share of all GPUs' time in which they do not compute, 0..1."""
        num_devices = sum(len(stage.devices) for stage in self.timelines)
        busy_s = sum(len(stage.devices) * stage.busy_s for stage in self.timelines)
        return 1 - busy_s / (self.step_time_s * num_devices)

    @property
    def peak_memory_bytes(self) -> dict[str, int]:
        """By device."""
        return {
            name: peak
            for stage in self.timelines
            for name, peak in zip(stage.devices, stage.device_peak_bytes, strict=True)
        }

    @property
    def device_busy_s(self) -> dict[str, float]:
        """Seconds of computing, by device."""
        return {name: s.busy_s for s in self.timelines for name in s.devices}


def simulate_plan(
    plan: Plan,
    cluster: Cluster,
    workload: Workload | None = None,
    profile: Profile | None = None,
    *,
    is_stock: bool = False,
) -> StepSimulation:
    """Simulate one step of a validated plan.

    Args:
        workload: what is trained; by default the plan's own.
        is_stock: stock Megatron runs the plan (`flags.stock.is_stock`), which waits for its sends.
    Raises:
        UsageError: neither the plan nor the caller says which model it is.
        PlanFormatError: the plan names no devices, or devices that the cluster lacks.
        UnsupportedError: it asks for something that cannot be priced yet (named).
        CheckFailedError: a programme waits for ever.
    """
    workload = workload or _workload(plan)
    placement = placement_of(plan, cluster)
    costs = CostModel(cluster, workload, profile).sharded_as(placement)
    rows = costs.vocab_rows(placement.widths)
    sends: SendMode = "waited" if is_stock else "buffered"
    replica_costs = [costs.replica(replica, rows) for replica in placement.replicas]
    pipelines = [
        _pipeline(
            costs,
            replica,
            replica_schedule(plan, r),
            _chunk_times(plan, r, cost, workload),
            sends,
        )
        for r, (replica, cost) in enumerate(zip(placement.replicas, replica_costs, strict=True))
    ]
    run = run_step(
        pipelines,
        list(gradient_collectives(costs, placement, rows, is_stock)),
        [[stage.update_s for stage in cost.stages] for cost in replica_costs],
    )
    return StepSimulation(
        tuple(
            tuple(
                _timeline(
                    costs,
                    replica,
                    (r, s),
                    rows,
                    run.operations[r, s],
                    [chunk.num_layers for chunk in stage_chunks(plan.replicas[r].stages[s])],
                )
                for s in range(len(replica.stages))
            )
            for r, replica in enumerate(placement.replicas)
        ),
        tuple(run.messages),
        tuple(run.collectives),
        tuple(_links(pipelines, run)),
        run.end_s,
        sends,
        all(cost.measured for replica in replica_costs for cost in replica.stages),
    )


def plan_times(
    plan: Plan, cluster: Cluster, profile: Profile | None = None
) -> tuple[tuple[StageTimes, ...], ...]:
    """Seconds of every stage, [replica][stage], from the cost model and the profile.

    Raises:
        UsageError, PlanFormatError, UnsupportedError: as `simulate_plan`.
    """
    placement = placement_of(plan, cluster)
    workload = _workload(plan)
    costs = CostModel(cluster, workload, profile).sharded_as(placement)
    rows = costs.vocab_rows(placement.widths)
    found = []
    for r, replica in enumerate(placement.replicas):
        cost = costs.replica(replica, rows)
        chunks = _chunk_times(plan, r, cost, workload)
        found.append(
            tuple(
                StageTimes(times, stage.update_s)
                for times, stage in zip(chunks, cost.stages, strict=True)
            )
        )
    return tuple(found)


def _chunk_times(
    plan: Plan, r: int, cost: ReplicaCost, workload: Workload
) -> tuple[tuple[ChunkTimes, ...], ...]:
    """[stage][chunk] of one replica."""
    stages = plan.replicas[r].stages
    return tuple(
        stage_chunk_times(stage, priced.times, workload, is_last=s + 1 == len(stages))
        for s, (stage, priced) in enumerate(zip(stages, cost.stages, strict=True))
    )


def _workload(plan: Plan) -> Workload:
    if plan.workload is None:
        raise UsageError(
            "the plan carries no model, so its time cannot be predicted; "
            "make it with `megatron-hetero plan`, or give the model"
        )
    return plan.workload


def _pipeline(
    costs: CostModel,
    replica: PlacedReplica,
    schedule: Schedule,
    times: Sequence[tuple[ChunkTimes, ...]],
    sends: SendMode,
) -> Pipeline:
    stages = [replica.stages[stage] for stage in schedule.chain]
    costs = costs.variant(micro_batch_size=replica.micro_batch_size)
    is_stock = sends == "waited"
    return Pipeline(
        schedule,
        tuple(times),
        tuple(crossing(costs, here, there, is_stock) for here, there in pairwise(stages)),
        tuple(crossing(costs, there, here, is_stock) for here, there in pairwise(stages)),
        sends,
    )


def _timeline(
    costs: CostModel,
    replica: PlacedReplica,
    place: StageId,
    rows: int,
    spans: Sequence[OpSpan],
    chunk_layers: Sequence[int],
) -> StageTimeline:
    index = place[1]
    stage = replica.stages[index]
    found = []
    # What one micro-batch keeps on each device: the difference between two in flight and one.
    one, two = (
        costs.stage_memories(_with_in_flight(replica, count), index, rows) for count in (1, 2)
    )
    for low, high, memory in zip(one, two, costs.stage_memories(replica, index, rows), strict=True):
        kept = _activations(high, stage.num_layers) - _activations(low, stage.num_layers)
        held = memory.peak_bytes(stage.num_layers) - replica.num_in_flight[index] * kept
        by_chunk = [kept * layers // stage.num_layers for layers in chunk_layers]
        timeline = tuple(_memory(held, by_chunk, spans))
        found.append((max(held for _, held in timeline), memory.capacity_bytes, timeline))
    _, capacity_bytes, timeline = max(found, key=lambda f: f[0] / f[1])
    return StageTimeline(
        *place,
        tuple(device.name for device in stage.devices),
        tuple(spans),
        timeline,
        capacity_bytes,
        tuple(peak for peak, *_ in found),
    )


def _memory(held: int, kept: Sequence[int], spans: Sequence[OpSpan]) -> Iterator[tuple[float, int]]:
    """Bytes of the whole step, and the activations of every micro-batch on every chunk from its
    forward to the end of its backward pass."""
    yield 0.0, held
    for span in spans:
        if span.kind == "forward":
            held += kept[span.chunk]
            yield span.start_s, held
        elif span.kind in ("backward", "backward_weight"):
            held -= kept[span.chunk]
            yield span.end_s, held


def _with_in_flight(replica: PlacedReplica, count: int) -> PlacedReplica:
    """The same replica when every stage keeps `count` micro-batches."""
    counts = (count,) * len(replica.stages)
    return replace(replica, num_micro_batches=count, launch_counts=counts)


def _activations(memory: StageMemory, num_layers: int) -> int:
    return memory.parts_bytes(num_layers)["activations"]


def _links(pipelines: Sequence[Pipeline], run: Run) -> Iterator[LinkTimeline]:
    """Every path that something took, in alphabetical order."""
    count: dict[str, int] = dict.fromkeys(run.path_busy_s, 0)
    carried: dict[str, float] = dict.fromkeys(run.path_busy_s, 0.0)
    for message in run.messages:
        pipeline = pipelines[message.pipeline]
        is_forward = message.operation.kind == "send_forward"
        chunk_place = pipeline.schedule.virtual_stage(message.sender, message.operation.chunk)
        crossed = pipeline.forward if is_forward else pipeline.backward
        taken = crossed[chunk_place if is_forward else chunk_place - 1]
        for path in taken.paths:
            count[path] += 1
            carried[path] += taken.num_bytes
    for collective, _, _ in run.collectives:
        ranks = len(collective.holders)
        for path, _ in collective.hops:
            carried[path] += 2 * (ranks - 1) / ranks * collective.num_bytes
    for path in sorted(run.path_busy_s):
        yield LinkTimeline(path, run.path_busy_s[path], count[path], carried[path])
