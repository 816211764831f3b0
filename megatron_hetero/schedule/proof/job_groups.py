"""The communicators of a job, and the peers of each rank across boundaries of stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.communication.communicators import (
    Communicator,
    model_communicators,
    stage_ranks,
)
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import Position, rank_table
from megatron_hetero.plan.sharding.stage_ranges import StageRanks, crossing_pairs, told_pairs
from megatron_hetero.plan.sharding.token_shares import uneven_tokens
from megatron_hetero.schedule.proof.gradients import Gradients


@dataclass
class JobGroups:
    """Who talks with whom in the job of a plan.

    `variable_lengths`, `full_buckets` and `dealt` are as in `of_plan.How`.
    """

    plan: Plan
    workload: Workload
    variable_lengths: bool
    full_buckets: bool
    dealt: tuple[tuple[tuple[int, int], ...], ...]

    @cached_property
    def places(self) -> tuple[Position, ...]:
        return rank_table(self.plan)

    @cached_property
    def gradients(self) -> Gradients:
        return Gradients.of(self.plan, self.workload, full=self.full_buckets)

    @cached_property
    def groups(self) -> tuple[Communicator, ...]:
        """Return all communicators, in the order of making."""
        # The job's, the stages', those of divided sequences, then those of gradients.
        size = len(self.places)
        world = (Communicator("world", tuple(range(size))),) if size > 1 else ()
        model = model_communicators(self.plan, self.variable_lengths)
        dealt = dict.fromkeys(c for columns in self.columns.values() for c in columns if c)
        return (*world, *model, *dealt, *self.gradients.communicators)

    @cached_property
    def columns(self) -> Mapping[tuple[int, int], Sequence[Communicator | None]]:
        """Map each group of replicas that divides sequences to a communicator for each place in
        them; None is that of the whole job."""
        of_stage = stage_ranks(self.plan)
        # [replica] -> ranks stage by stage: places of alike replicas correspond.
        own = [
            [rank for s in range(len(replica.stages)) for rank in of_stage[r, s]]
            for r, replica in enumerate(self.plan.replicas)
        ]
        groups = sorted({group for of in self.dealt for group in of})
        found: dict[tuple[int, int], list[Communicator | None]] = {}
        for first, stop in groups:
            if stop - first > 1:
                found[first, stop] = [
                    None if len(ranks) == len(self.places) else Communicator("sequences", ranks)
                    for ranks in zip(*own[first:stop], strict=True)
                ]
        return found

    @cached_property
    def number_of(self) -> Mapping[Communicator, int]:
        return {group: number for number, group in enumerate(self.groups)}

    @cached_property
    def groups_of(self) -> list[list[int]]:
        """[rank] -> its communicators."""
        found: list[list[int]] = [[] for _ in self.places]
        for number, group in enumerate(self.groups):
            for rank in group.ranks:
                found[rank].append(number)
        return found

    def group_for(self, rank: int, use: str) -> int | None:
        """Return a rank's communicator for a use; None if it has none."""
        return next((n for n in self.groups_of[rank] if self.groups[n].use == use), None)

    def divided(self, rank: int) -> Mapping[int, int]:
        """Map micro-batches of a rank's replica to the communicators of their sequences."""
        found = {}
        # A column of the whole job is communicator 0, the world.
        for k, group in enumerate(self.dealt[self.places[rank].replica]):
            for column in self.columns.get(group, ()):
                if column is None or rank in column.ranks:
                    found[k] = 0 if column is None else self.number_of[column]
        return found

    @cached_property
    def stages(self) -> dict[tuple[int, int], StageRanks]:
        # Ranks of each stage with their parts of sequences.
        length = self.workload.model.seq_length
        shapes = {
            (r, s): stage.shape
            for r, replica in enumerate(self.plan.replicas)
            for s, stage in enumerate(replica.stages)
        }
        return {
            key: StageRanks(ranks, shapes[key].context_parallel, uneven_tokens(shapes[key], length))
            for key, ranks in stage_ranks(self.plan).items()
        }

    @cached_property
    def crossings(self) -> dict[tuple[int, int], dict[int, tuple[list[int], list[int]]]]:
        """Map (replica, boundary) to each rank's peers: the ranks with pieces of its activation,
        and those with shapes."""
        model, training = self.workload.model, self.workload.training
        found: dict[tuple[int, int], dict[int, tuple[list[int], list[int]]]] = {}
        for r, replica in enumerate(self.plan.replicas):
            # Elements of an activation decide how it is cut into pieces.
            size = replica.micro_batch_size or training.micro_batch_size
            sizes = {size * model.seq_length * model.hidden_size}
            stages = chain(replica)
            for boundary in range(len(stages) - 1):
                before, after = (self.stages[r, stages[b]] for b in (boundary, boundary + 1))
                # Peers of each rank on both sides, in the order of its operations.
                own: dict[int, tuple[list[int], list[int]]] = {
                    rank: ([], []) for rank in (*before.ranks, *after.ranks)
                }
                pairs = (crossing_pairs(before, after, sizes), told_pairs(before, after))
                for place, of in enumerate(pairs):
                    for sender, receiver in sorted(of):
                        own[sender][place].append(receiver)
                        own[receiver][place].append(sender)
                found[r, boundary] = own
        return found
