"""Simulation of an optimizer step on the plan's cluster: the timeline of every GPU and link.

The programmes are those that the runtime executes, on the paths of the cluster, which replicas
share.  Computations last as the cost model says (tensor-parallel communication included), messages
as the links are described; after the pipelines, or within them, comes the gradient exchange, then
the optimizer.

Not modelled: a receiver whose buffers are full, flows that share a path fairly (messages go one
after the other), the host's own time between kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from megatron_hetero.bounds.estimate import workload_of
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.placement import PlacedReplica
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import CheckFailedError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.exchange.gradients import GradientExchange
from megatron_hetero.schedule.network import crossing
from megatron_hetero.schedule.of_plan import replica_schedule
from megatron_hetero.schedule.parts import (
    ChunkTimes,
    Collective,
    MessageSpan,
    Pipeline,
    SendMode,
)
from megatron_hetero.schedule.programme import OperationKind, Schedule
from megatron_hetero.schedule.simulator.engine import run_step
from megatron_hetero.schedule.simulator.stage_times import (
    forward_layers,
    last_backward_of,
    replica_chunk_times,
)
from megatron_hetero.schedule.simulator.timelines import (
    LinkTimeline,
    StageTimeline,
    link_timelines,
    stage_timeline,
)
from megatron_hetero.schedule.stock import sends_as_stock


@dataclass(frozen=True)
class StepSimulation:
    """A whole step.  `stages` is [replica][stage]; times count from the step's begin."""

    stages: tuple[tuple[StageTimeline, ...], ...]
    messages: tuple[MessageSpan, ...]
    """`pipeline` is the replica; `sender` and `receiver` are stages."""
    collectives: tuple[tuple[Collective, float, float], ...]
    """Exchanges of gradients and of new weights with their start and end; holders are (replica,
    stage)."""
    links: tuple[LinkTimeline, ...]
    step_time_s: float
    sends: SendMode
    measured: bool
    """True if every computation's time was measured (profile.json)."""

    @cached_property
    def timelines(self) -> tuple[StageTimeline, ...]:
        """Return all stages of all replicas in reading order."""
        return tuple(stage for replica in self.stages for stage in replica)

    @property
    def pipelines_s(self) -> float:
        """Return the seconds until the last backward pass of the last replica ends."""
        return max(stage.compute_end_s for stage in self.timelines)

    @property
    def gradient_sync_s(self) -> float:
        """Return the seconds from then until the last gradient is reduced."""
        return max(0.0, self._last_end_s("gradient_sync") - self.pipelines_s)

    @property
    def weight_sync_s(self) -> float:
        """Return the seconds that the exchange of new weights takes after the last update."""
        return max(0.0, self._last_end_s("weight_sync") - self._last_end_s("step"))

    def _last_end_s(self, kind: OperationKind) -> float:
        # 0 where the step has no such operation.
        spans = (o for stage in self.timelines for o in stage.operations if o.kind == kind)
        return max((span.end_s for span in spans), default=0.0)

    @property
    def bubble(self) -> float:
        """Return the share of all GPUs' time without computation, 0..1."""
        num_devices = sum(len(stage.devices) for stage in self.timelines)
        busy_s = sum(len(stage.devices) * stage.busy_s for stage in self.timelines)
        return 1 - busy_s / (self.step_time_s * num_devices)

    @property
    def peak_memory_bytes(self) -> dict[str, int]:
        """Return the peak of memory by device."""
        return {
            name: peak
            for stage in self.timelines
            for name, peak in zip(stage.devices, stage.device_peak_bytes, strict=True)
        }

    @property
    def device_busy_s(self) -> dict[str, float]:
        """Return the seconds of computing by device."""
        return {name: s.busy_s for s in self.timelines for name in s.devices}


def simulate_plan(
    plan: Plan,
    cluster: Cluster,
    workload: Workload | None = None,
    profile: Profile | None = None,
    *,
    is_stock: bool | None = None,
    costs: CostModel | None = None,
) -> StepSimulation:
    """Simulate one step of a validated plan.

    Args:
        plan: with devices of `cluster`.
        profile: measured times; None has the analytic model for all.
        workload: what is trained; by default the plan's own.
        is_stock: whether stock Megatron runs the plan, which waits for its sends; by default where
            it can, as `flags` emits it, and the job's `sends` does not say otherwise.
        costs: the price list of `workload` and `profile` on `cluster`, if there is one already.
    Raises:
        UsageError: neither the plan nor the caller says which model it is.
        PlanFormatError: the plan names no devices, or devices that the cluster lacks.
        UnsupportedError: it asks for something that cannot be priced yet (named).
        CheckFailedError: a programme waits for ever.
    """
    # Prices: one list for the plan's sharded layers.
    workload = workload or workload_of(plan)
    placement = placement_of(plan, cluster)
    if is_stock is None:
        is_stock = sends_as_stock(plan, workload)
    costs = (costs or CostModel(cluster, workload, profile)).sharded_as(placement)
    rows = costs.vocab_rows(placement.widths)
    # Pipelines: every replica's schedule with its chunks' times and its messages' paths.
    sends = _sends(plan, is_stock, workload.training.waits_for_receivers)
    replica_costs = [costs.replica(replica, rows) for replica in placement.replicas]
    pipelines = [
        _pipeline(
            costs,
            replica,
            replica_schedule(plan, r),
            replica_chunk_times(plan, r, cost, workload),
            sends,
            is_stock,
        )
        for r, (replica, cost) in enumerate(zip(placement.replicas, replica_costs, strict=True))
    ]
    # The exchange of gradients, with what it needs to know of layers, owners, chunks and memory.
    exchange = GradientExchange(
        costs,
        placement,
        rows,
        {
            (r, 0): last_backward_of(costs, replica, rows, made.stages[0], pipeline.times[0])
            for r, (replica, made, pipeline) in enumerate(
                zip(placement.replicas, plan.replicas, pipelines, strict=True)
            )
        },
        {
            (r, s): stage.optimizer_share or 1
            for r, replica in enumerate(plan.replicas)
            for s, stage in enumerate(replica.stages)
        },
        {
            (r, s): [chunk.num_layers for chunk in stage_chunks(stage)]
            for r, replica in enumerate(plan.replicas)
            for s, stage in enumerate(replica.stages)
        },
        costs.rooms(replica_costs),
        forward_layers(plan, placement, costs, rows, [pipeline.times for pipeline in pipelines]),
    )
    # Run everything; stock Megatron starts all gathers with the step for interleaved stages alone.
    gradients, weights = exchange.stock() if is_stock else exchange.ours()
    try:
        run = run_step(
            pipelines,
            gradients,
            [[stage.update_s for stage in cost.stages] for cost in replica_costs],
            weights,
            lazily=is_stock and sends != "overlapped",
        )
    except CheckFailedError as error:
        if sends != "rendezvous":
            raise
        raise CheckFailedError(
            f"{error}: two stages wait for each other, because senders wait for their receivers "
            "(--sends rendezvous). Plan with --sends rendezvous, which keeps to launch counts that "
            "end, or take --sends buffered."
        ) from error
    # Timelines of stages and links.
    return StepSimulation(
        tuple(
            tuple(
                stage_timeline(
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
        tuple(link_timelines(pipelines, run)),
        run.end_s,
        sends,
        all(cost.measured for replica in replica_costs for cost in replica.stages),
    )


def _sends(plan: Plan, is_stock: bool, waits: bool) -> SendMode:
    """Return how stages send: stock Megatron waits for its sends; interleaved it overlaps some.

    Args:
        plan: decides whether stages are interleaved.
        is_stock: whether stock Megatron runs it.
        waits: whether another trainer does that waits for its receivers.
    """
    if not is_stock:
        return "rendezvous" if waits else "buffered"
    is_interleaved = any(s.chunks for replica in plan.replicas for s in replica.stages)
    return "overlapped" if is_interleaved else "waited"


def _pipeline(
    costs: CostModel,
    replica: PlacedReplica,
    schedule: Schedule,
    times: Sequence[tuple[ChunkTimes, ...]],
    sends: SendMode,
    is_stock: bool,
) -> Pipeline:
    # Messages go between neighbours in the chain, which returns to stages that have chunks.
    stages = [replica.stages[stage] for stage in schedule.chain]
    costs = costs.variant(micro_batch_size=replica.micro_batch_size)
    return Pipeline(
        schedule,
        tuple(times),
        tuple(crossing(costs, here, there, is_stock) for here, there in pairwise(stages)),
        tuple(crossing(costs, there, here, is_stock) for here, there in pairwise(stages)),
        sends,
    )
