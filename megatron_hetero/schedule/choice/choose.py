"""Schedules for a plan's replicas, made for the replicas' times, hops and memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.network.seconds import BoundaryTime
from megatron_hetero.cost.placement import PlacedReplica
from megatron_hetero.cost.placing import placement_of
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.errors import CheckFailedError, PlanFormatError, UsageError
from megatron_hetero.plan.checks.validate import first_violations
from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.in_flight import num_in_flight
from megatron_hetero.plan.plan import Plan, Replica, ScheduleName
from megatron_hetero.schedule.choice.in_turn import in_turn
from megatron_hetero.schedule.choice.ruled_out import why_not_in_chunks, why_not_split
from megatron_hetero.schedule.of_plan import check_schedules, with_schedule
from megatron_hetero.schedule.orders.chunk_times import stage_chunk_times
from megatron_hetero.schedule.orders.interleaved import interleaved
from megatron_hetero.schedule.orders.list_schedule import Listed, TimedPipeline
from megatron_hetero.schedule.orders.one_f_one_b import one_f_one_b
from megatron_hetero.schedule.orders.synthesise import synthesise
from megatron_hetero.schedule.orders.zero_bubble import zero_bubble
from megatron_hetero.schedule.simulator.pipeline import simulate
from megatron_hetero.schedule.simulator.step import simulate_plan
from megatron_hetero.schedule.stock import sends_as_stock


@dataclass(frozen=True)
class ScheduledPlan:
    """A plan under a given kind of schedule, with the simulated times of the replicas.

    `pipeline_times_s` and `peaks` (micro-batches or passes under way, [stage]) are [replica].
    `held` says why the kind cannot be had, and then there is nothing else.
    """

    name: ScheduleName
    plan: Plan | None
    pipeline_times_s: tuple[float, ...] = ()
    peaks: tuple[tuple[int, ...], ...] = ()
    held: str = ""

    @property
    def has_launch_counts(self) -> bool:
        """Return whether the schedule is 1F1B with changed launch counts."""
        return (
            self.name == "1f1b"
            and self.plan is not None
            and any(
                s.num_launched_forwards is not None for r in self.plan.replicas for s in r.stages
            )
        )

    @property
    def slowest_s(self) -> float:
        """Return the seconds of the slowest replica, which the step waits for."""
        return max(self.pipeline_times_s)


def candidates(
    plan: Plan,
    cluster: Cluster,
    profile: Profile | None = None,
    num_chunks: int = 2,
    *,
    in_full: bool = False,
) -> tuple[ScheduledPlan, ...]:
    """Make 1F1B with the plan's launch counts, and every other kind of schedule for the plan.

    Args:
        plan: valid on `cluster`, with a workload and devices; orders and chunks are left aside.
        num_chunks: chunks on each stage of an interleaved pipeline.
        in_full: for a reader: times with the queues of messages that share a link, as
            `simulate_plan` has them, and of a kind that the job's layers cannot run what is lost
            with it.  Else each replica is timed as if the links were its own.
    """
    # Every kind starts from the same plan, without orders and chunks.
    plain = _without_orders(plan)
    maker = _Maker(plain, cluster, profile, has_queues=in_full)
    first, split = maker.candidate("1f1b", plain), maker.candidate("zero-bubble", plain)
    if in_full and maker.whole_only:
        split = replace(split, held=f"{split.held}; {maker.loss_of_whole(plain, first)}")
    return first, maker.interleaved(num_chunks), split, maker.candidate("synthesised", plain)


def _without_orders(plan: Plan) -> Plan:
    """Return the plan in one piece a stage, with 1F1B."""
    replicas = []
    for replica in plan.replicas:
        first, stages = 0, []
        for stage in replica.stages:
            stages.append(replace(stage, first_layer=first, chunks=(), order=None))
            first += stage.shape.num_layers
        replicas.append(replace(replica, stages=tuple(stages)))
    return replace(plan, replicas=tuple(replicas), schedule="1f1b", estimates=None)


class _Maker:
    """Maker of schedules for the replicas of one plan."""

    def __init__(
        self, plan: Plan, cluster: Cluster, profile: Profile | None, *, has_queues: bool
    ) -> None:
        if plan.workload is None:
            raise UsageError("the plan carries no model, so its passes cannot be timed")
        self.plan, self.workload, self.has_queues = plan, plan.workload, has_queues
        self.whole_only = why_not_split(self.workload)
        self.placement = placement_of(plan, cluster)
        self.costs = CostModel(cluster, plan.workload, profile).sharded_as(self.placement)
        self.rows = self.costs.vocab_rows(self.placement.widths)
        self._made: dict[Hashable, Listed] = {}

    def candidate(self, name: ScheduleName, plan: Plan) -> ScheduledPlan:
        """Make the plan with orders of one kind on all replicas of several stages."""
        if name == "zero-bubble" and self.whole_only:
            return ScheduledPlan(name, None, held=self.whole_only)
        found = self._candidate(name, plan)
        # What a plan has beside its orders may rule them out, such as sharded layers.
        if found.plan is not None and (violations := first_violations(found.plan)):
            return ScheduledPlan(name, None, held=violations[0].message)
        return found

    def loss_of_whole(self, plan: Plan, first: ScheduledPlan) -> str:
        """Say how much shorter the pipelines would be with split backward passes than `first`."""
        split = self._candidate("zero-bubble", plan)
        if split.plan is None:
            return f"nothing is lost, as without that {split.held}"
        gain = 1 - split.slowest_s / first.slowest_s
        if gain <= 0:
            return "nothing is lost: it would be no shorter than 1F1B"
        return f"it would be {gain:.1%} shorter than 1F1B, with layers as fast as these"

    def _candidate(self, name: ScheduleName, plan: Plan) -> ScheduledPlan:
        times_s, peaks = [], []
        made = plan
        for r, replica in enumerate(plan.replicas):
            pipeline = self._pipeline(r, replica)
            # A kind that one replica cannot have cannot be had for the plan.
            try:
                made, listed = self._with_replica(made, name, r, pipeline)
            except (CheckFailedError, PlanFormatError) as error:
                return ScheduledPlan(name, None, held=f"replica {r}: {error}")
            # Alone, without paths that replicas share.
            simulated = simulate(
                listed.schedule, pipeline.times, pipeline.forward_hops, pipeline.backward_hops
            )
            times_s.append(simulated.makespan_s)
            peaks.append(simulated.peak_in_flight)
        check_schedules(made)
        # Stock Megatron waits for its sends.
        if self.has_queues or sends_as_stock(made):
            run = simulate_plan(made, self.costs.cluster, profile=self.costs.profile)
            times_s = [max(stage.compute_end_s for stage in stages) for stages in run.stages]
        return ScheduledPlan(name, made, tuple(times_s), tuple(peaks))

    def interleaved(self, num_chunks: int) -> ScheduledPlan:
        """Make the plan with every stage of a longer pipeline in as many chunks, along the stages
        in turn."""
        held = why_not_in_chunks(self.workload)
        if held:
            return ScheduledPlan("interleaved", None, held=held)
        replicas = []
        for r, replica in enumerate(self.plan.replicas):
            # A pipeline of one stage has no bubble, and stays as it is.
            if len(replica.stages) > 1:
                least = min(stage.shape.num_layers for stage in replica.stages)
                if least < num_chunks:
                    held = f"replica {r} has a stage of {least} layers for {num_chunks} chunks"
                    return ScheduledPlan("interleaved", None, held=held)
                replica = in_turn(replica, num_chunks)
            replicas.append(replica)
        return self.candidate("interleaved", replace(self.plan, replicas=tuple(replicas)))

    def _with_replica(
        self, plan: Plan, name: ScheduleName, r: int, pipeline: TimedPipeline
    ) -> tuple[Plan, Listed]:
        """Schedule one replica of the plan, with lower limits once messages turn out to need the
        memory.

        Args:
            plan: the plan so far.
            name: kind of schedule.
            r: the replica.
            pipeline: its times and hops.
        Raises:
            CheckFailedError: there is none within the memory, or at all.
        """
        own = self.placement.replicas[r].num_in_flight
        limits = self._limits(self.placement.replicas[r])
        while True:
            listed = self._schedule_once(name, r, pipeline, limits)
            # 1F1B's launch counts keep to the limits by themselves, and a single stage has no
            # messages.
            if name == "1f1b" or pipeline.num_stages == 1:
                return plan, listed
            # Other orders hold messages too: look which stages no longer fit with them.
            made = with_schedule(plan, r, listed.schedule, name)
            full = self._full_stages(made, r)
            # Lower the limit of each full stage by one, but not below 1F1B's own number.
            lower = [limit - (s in full and limit > own[s]) for s, limit in enumerate(limits)]
            if not full:
                return made, listed
            # Nothing left to lower.
            if lower == limits or name == "interleaved":
                s, kept = next(iter(full.items()))
                raise CheckFailedError(
                    f"stage {s} would keep {kept} micro-batches; {limits[s]} fit"
                )
            limits = lower

    def _schedule_once(
        self, name: ScheduleName, r: int, pipeline: TimedPipeline, limits: Sequence[int]
    ) -> Listed:
        """Make the schedule of a replica once for all identical replicas."""
        key = name, pipeline, self.placement.replicas[r].num_in_flight, tuple(limits)
        if key not in self._made:
            self._made[key] = self._schedule(name, r, pipeline, limits)
        return self._made[key]

    def _schedule(
        self, name: ScheduleName, r: int, pipeline: TimedPipeline, limits: Sequence[int]
    ) -> Listed:
        num_stages, m = pipeline.num_stages, pipeline.num_micro_batches
        # One stage has one order of passes.
        if name == "1f1b" or num_stages == 1:
            counts = self.placement.replicas[r].num_in_flight
            return Listed(one_f_one_b(num_stages, m, counts), 0.0)
        if name == "interleaved":
            return Listed(interleaved(pipeline.chain, m), 0.0)
        if name == "zero-bubble":
            return zero_bubble(pipeline, limits)
        counts = self.placement.replicas[r].num_in_flight
        return synthesise(pipeline, limits, counts, split=not self.whole_only)

    def _pipeline(self, r: int, replica: Replica) -> TimedPipeline:
        placed = self.placement.replicas[r]
        cost = self.costs.replica(placed, self.rows)
        last = len(replica.stages) - 1
        on_stage = chain(replica)
        costs = self.costs.variant(micro_batch_size=placed.micro_batch_size)
        # Boundaries follow the chain of chunks, so a stage may stand on several of them.
        stages = [placed.stages[s] for s in on_stage]

        def hops(backward: bool) -> tuple[BoundaryTime, ...]:
            pairs = [(b, a) if backward else (a, b) for a, b in pairwise(stages)]
            return tuple(costs.stage_hop(*pair) for pair in pairs)

        return TimedPipeline(
            on_stage,
            replica.num_micro_batches,
            tuple(
                stage_chunk_times(stage, cost.stages[s].times, self.workload, is_last=s == last)
                for s, stage in enumerate(replica.stages)
            ),
            hops(backward=False),
            hops(backward=True),
        )

    def _full_stages(self, made: Plan, r: int) -> dict[int, int]:
        """Return {stage: micro-batches kept} for the stages with too little memory, messages
        included. Where the plan itself does not fit, as many as it keeps may."""
        # Compare with the plan as it was: a stage that was full before may keep as many as then.
        own = self.placement.replicas[r]
        placed = placement_of(made, self.costs.cluster).replicas[r]
        kept = {s: num_in_flight(made, r, s) for s in range(len(placed.stages))}
        return {
            s: num
            for s, num in kept.items()
            if not self._holds(placed, s) and (num > own.num_in_flight[s] or self._holds(own, s))
        }

    def _limits(self, placed: PlacedReplica) -> list[int]:
        """Count the micro-batches for which each stage's GPUs have memory, at least 1F1B's number.
        """
        return [
            max(own, self._limit(placed, index)) for index, own in enumerate(placed.num_in_flight)
        ]

    def _limit(self, placed: PlacedReplica, index: int) -> int:
        # Memory grows with the number kept: bisect the largest that fits.
        low, high = 1, placed.num_micro_batches
        while low < high:
            middle = (low + high + 1) // 2
            fits = self._fits(placed, index, [middle] * len(placed.stages))
            low, high = (middle, high) if fits else (low, middle - 1)
        return low

    def _fits(self, placed: PlacedReplica, index: int, counts: Sequence[int]) -> bool:
        return self._holds(replace(placed, launch_counts=tuple(counts)), index)

    def _holds(self, placed: PlacedReplica, index: int) -> bool:
        memory = self.costs.stage_memory(placed, index, self.rows)
        return memory.peak_bytes(placed.stages[index].num_layers) <= memory.capacity_bytes
