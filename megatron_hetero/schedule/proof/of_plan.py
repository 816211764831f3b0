"""The operations of a plan's job: its start, one step of training, and one of validation.

The list has what the runtime gives the library, in its order (a test holds it against real runs).
It is stricter in two ways: operations inside of a stage stand for all of a pass, and gradients are
in as many buckets as they can be, so that one waits behind another wherever one may.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from megatron_hetero.cost.sync.buckets import EMBEDDING
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.chunks import chain, stage_chunks
from megatron_hetero.plan.communication.communicators import (
    INNER_USES,
    MESSAGE_USES,
    Communicator,
    last_stage_ranks,
)
from megatron_hetero.plan.communication.under_way import messages_under_way
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import Position, rank_names
from megatron_hetero.schedule.of_plan import replica_schedule
from megatron_hetero.schedule.orders.delivery import StagePosts, arrived_sends, stage_posts
from megatron_hetero.schedule.orders.early_gradients import early_gradients
from megatron_hetero.schedule.programme import Message, Operation, Schedule
from megatron_hetero.schedule.proof.gradients import ALL_LATE, NONE_LATE, RankGradients
from megatron_hetero.schedule.proof.job_groups import JobGroups
from megatron_hetero.schedule.proof.operations import JobOperations, RankItems
from megatron_hetero.schedule.proof.stage import BoundarySide, RankStage, StageItems


@dataclass(frozen=True)
class How:
    """What else decides the operations of a job.

    Attributes:
        variable_lengths: shapes of activations go ahead of them.
        aligned: only first stages start gradients within their last backward passes
            (`--align-grad-reduce`).
        full_buckets: as `Gradients.of`.
        deepest_late: gradients of this layer and of all before it are exchanged after the passes,
            because a rank has no room for more (`GradientSync`), or all of them, in the first step,
            which learns when gradients are complete.
        dealt: [replica][micro-batch] -> the group of replicas that divide the micro-batch's
            sequences, as (first, one behind the last) (`--hetero-sequences`); empty without.
    """

    variable_lengths: bool = False
    aligned: bool = True
    full_buckets: bool = False
    deepest_late: int = NONE_LATE
    dealt: tuple[tuple[tuple[int, int], ...], ...] = ()


def job_operations(plan: Plan, workload: Workload, how: How | None = None) -> JobOperations:
    """Return the operations of all ranks of a validated plan.

    Args:
        plan: the plan.
        workload: its model and training.
        how: what else decides them.
    """
    return PlanOperations(plan, workload, how or How()).operations()


@dataclass
class PlanOperations:
    """The operations of a validated plan's job; `job_operations` says it for one `deepest_late`."""

    plan: Plan
    workload: Workload
    how: How

    def operations(self, deepest_late: int | None = None) -> JobOperations:
        """Write the items of all ranks; with another `How.deepest_late`, if one is given."""
        late = self.how.deepest_late if deepest_late is None else deepest_late
        ranks = [RankItems(rank) for rank in range(len(self.job.places))]
        self._start(ranks)
        for items in ranks:
            self._step(items, late)
        return JobOperations(
            self.job.groups,
            [items.items for items in ranks],
            [items.training for items in ranks],
            rank_names(self.plan),
        )

    @cached_property
    def job(self) -> JobGroups:
        how, plan, workload = self.how, self.plan, self.workload
        return JobGroups(plan, workload, how.variable_lengths, how.full_buckets, how.dealt)

    @cached_property
    def last_ranks(self) -> frozenset[int]:
        return frozenset(last_stage_ranks(self.plan))

    @cached_property
    def schedules(self) -> list[Schedule]:
        """[replica] -> its schedule; alike replicas have the same one."""
        known: dict[tuple[object, ...], Schedule] = {}
        found = []
        for r, replica in enumerate(self.plan.replicas):
            # Orders, counts and chunks make a schedule; devices do not.
            key = (
                tuple((s.order, s.num_launched_forwards, s.chunks) for s in replica.stages),
                replica.num_micro_batches,
            )
            if key not in known:
                known[key] = replica_schedule(self.plan, r)
            found.append(known[key])
        return found

    @cached_property
    def _timing(self) -> dict[tuple[int, int], tuple[StagePosts, Mapping[Message, int]]]:
        return {}

    def timing(self, r: int, s: int) -> tuple[StagePosts, Mapping[Message, int]]:
        """Return a stage's posts of receives, and the sends known to have arrived by each message.
        """
        schedule = self.schedules[r]
        key = id(schedule), s
        if key not in self._timing:
            # The runtime has so many communicators a boundary, and posts no more receives at a
            # time.
            turns = messages_under_way(self.plan, r, self.how.variable_lengths)
            self._timing[key] = (
                stage_posts(schedule, s, dict(enumerate(turns))),
                arrived_sends(schedule, s),
            )
        return self._timing[key]

    def _start(self, ranks: list[RankItems]) -> None:
        """Make and connect all communicators (`runtime.parallel.connecting`)."""
        # All ranks make communicators in one order, each before the next.
        for number, group in enumerate(self.job.groups):
            for rank in group.ranks:
                items = ranks[rank]
                if group.use not in MESSAGE_USES:
                    items.done(number, f"start of {group}")
                else:
                    messages = self._first_messages(rank, group)
                    items.wait(items.messages(number, messages, f"start of {group}"))
                items.sync()

    def _first_messages(self, rank: int, group: Communicator) -> list[tuple[int, bool]]:
        place = self.job.places[rank]
        boundary = group.boundary or 0
        # Either shapes (place 1) or pieces of activations (place 0).
        peers = self.job.crossings[place.replica, boundary][rank][group.use == "shapes"]
        # The stage before the boundary sends forward and receives backward.
        is_before = chain(self.plan.replicas[place.replica])[boundary] == place.stage
        return [(peer, is_before != (group.use == "backward")) for peer in peers]

    def _rank_stage(self, rank: int) -> RankStage:
        place, training = self.job.places[rank], self.workload.training
        r, s = place.replica, place.stage
        replica = self.plan.replicas[r]
        stage, stages = replica.stages[s], chain(replica)
        # Receives of the stage, and its communicators by what they are for.
        posts, arrived = self.timing(r, s)
        by_use: dict[tuple[str, int | None], list[int]] = {}
        for number in self.job.groups_of[rank]:
            group = self.job.groups[number]
            by_use.setdefault((group.use, group.boundary), []).append(number)
        # Both directions of each boundary that the stage touches.
        sides = {}
        for boundary in range(len(stages) - 1):
            if s not in stages[boundary : boundary + 2]:
                continue
            forward, backward = (by_use[use, boundary] for use in ("forward", "backward"))
            is_before = stages[boundary] == s
            peers, told = self.job.crossings[r, boundary][rank]
            sides[boundary] = BoundarySide(
                forward if is_before else backward,
                backward if is_before else forward,
                peers,
                by_use.get(("shapes", boundary), ()),
                told,
            )
        # Layers of each chunk; the embedding before the first layer, the head behind the last.
        chunks = [
            list(range(chunk.first_layer, chunk.first_layer + chunk.num_layers))
            for chunk in stage_chunks(stage)
        ]
        if s == 0:
            chunks[0].insert(0, EMBEDDING)
        if s == len(replica.stages) - 1:
            chunks[-1].append(self.workload.model.num_layers)
        inner = [n for use in INNER_USES for n in by_use.get((use, None), ())]
        tensor = by_use.get(("tensor", None), ())
        return RankStage(
            self.schedules[r],
            s,
            posts,
            arrived,
            chunks,
            frozenset(self.job.gradients.sharded),
            inner,
            self.job.divided(rank) if self.how.dealt else {},
            tensor[0] if tensor else None,
            sides,
            training.sequence_parallel,
        )

    def _step(self, items: RankItems, deepest_late: int) -> None:
        """Write a step of training, then a step of validation."""
        # A step of training: forward and backward passes with their exchanges.
        begin = len(items.items)
        training, rank = self.workload.training, items.rank
        place = self.job.places[rank]
        of = self._rank_stage(rank)
        num_idle_rounds = self._num_idle_rounds(place.replica)
        overlaps = training.overlap_grad_reduce
        late = deepest_late if overlaps else ALL_LATE
        gradients = RankGradients(self.job.gradients, items, self.job.number_of, late)
        StageItems(
            of,
            items,
            gradients,
            early=self._early(place) if overlaps else {},
            overlaps_gathers=training.overlap_param_gather,
            num_idle_rounds=num_idle_rounds,
        ).run()
        # What follows the passes: rest of the gradients, tokens, losses, norm of the gradients.
        gradients.finish()
        self._agree(items, "tokens of the step")
        losses = self._losses(rank)
        if losses is not None:
            items.done(losses, "losses")
        items.sync()
        self._agree(items, "norm of the gradients")
        items.sync()
        # New weights are gathered after the update.
        # With --overlap-param-gather each is waited for later, where a pass first needs it.
        for operation in gradients.start_weights():
            items.wait(operation)
        items.training = slice(begin, len(items.items))
        # A step of validation: forward passes alone, and their losses.
        StageItems(
            of,
            items,
            gradients,
            forward_only=True,
            overlaps_gathers=training.overlap_param_gather,
            num_idle_rounds=num_idle_rounds,
        ).run()
        if losses is not None:
            items.done(losses, "losses of validation")
        items.sync()

    def _early(self, place: Position) -> Mapping[Operation, tuple[int, ...]]:
        if self.plan.layout.has_idle_rounds:
            return {}
        schedule = self.schedules[place.replica]
        return early_gradients(schedule, place.stage, aligned=self.how.aligned)

    def _num_idle_rounds(self, replica: int) -> int:
        if not self.plan.layout.has_idle_rounds:
            return 0
        # Micro-batches that the longest replica has more.
        counts = [other.num_micro_batches for other in self.plan.replicas]
        return max(counts) - counts[replica]

    def _agree(self, items: RankItems, what: str) -> None:
        if len(self.job.places) > 1:
            items.done(0, what)

    def _losses(self, rank: int) -> int | None:
        # Losses need a communicator only where several ranks compute parts of them.
        last = self.last_ranks
        if rank not in last or len(last) == 1:
            return None
        return 0 if len(last) == len(self.job.places) else self.job.group_for(rank, "losses")
