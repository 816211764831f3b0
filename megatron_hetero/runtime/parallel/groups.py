"""Process groups of one rank, made from the plan in one order that is the same on every rank.

Collectives run in the tensor-parallel group of each stage, in the group of the last stages (the
job's loss), and in the world. A pipeline has no group, because stages of unlike width have no
common columns: `PipelinePlace` answers Megatron's two questions, rank and size, and the two stages
of a boundary have a group for each direction of their messages (`runtime.parallel.boundary`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import Position, rank_table
from megatron_hetero.plan.sharding.stage_ranges import StageRanks


@dataclass(frozen=True)
class PipelinePlace:
    """This rank's stage, with the two methods that Megatron calls on a pipeline group."""

    stage: int
    num_stages: int

    def rank(self) -> int:
        return self.stage

    def size(self) -> int:
        return self.num_stages


@dataclass(frozen=True)
class Hop:
    """Groups in which the ranks of two neighbouring stages exchange messages.

    There is one for each direction: NCCL runs the messages of a group in order, and a forward that
    waits for its receiver must not delay the gradient that this receiver sends. `shapes`, where
    sequences have unlike lengths, carries the shapes of the activations.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    shapes: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class RankGroups:
    """Place of this rank, and the groups in which it communicates. Rank lists are global ranks."""

    position: Position
    pipeline: PipelinePlace
    world: dist.ProcessGroup
    tensor: dist.ProcessGroup
    tensor_ranks: tuple[int, ...]
    context: dist.ProcessGroup
    """The ranks that hold what this one holds, and other parts of its sequences."""
    context_ranks: tuple[int, ...]
    stage: dist.ProcessGroup
    """All ranks of the stage."""
    copy: int
    """Number of this rank's copy of the model: one for each replica and context-parallel rank."""
    alone: dist.ProcessGroup
    last_stages: dist.ProcessGroup | None
    """All ranks of all last stages; None on other stages."""
    stage_ranks: tuple[StageRanks, ...]
    """[stage] -> its ranks, of this rank's replica."""
    chain: tuple[int, ...]
    """[virtual stage] -> stage, of this rank's replica (`schedule.programme`)."""
    hops: Mapping[int, Hop]
    """Hops by boundary: `b` lies between the virtual stages b and b + 1. Only those of this
    rank."""
    timeout: timedelta
    """Limit of a collective, in every group; torch's default is not the user's."""

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.stage == self.pipeline.num_stages - 1

    def collection(self) -> ProcessGroupCollection:
        """Return the value for `pretrain(pg_collection=)`.

        Data-parallel groups hold this rank alone, `mp` is the world (see
        `runtime.megatron.parallel_state`); `embd` is None because tied embeddings are reduced with
        all other gradients.
        """
        return ProcessGroupCollection(
            tp=self.tensor,
            pp=self.pipeline,
            mp=self.world,
            embd=None,
            pos_embd=None,
            cp=self.context,
            tp_cp=self.stage,
            hcp=None,
            ep=self.alone,
            expt_tp=self.tensor,
            tp_ep=self.tensor,
            tp_ep_pp=self.world,
            tp_ep_pp_with_egtp_remat=self.world,
            tp_dp_cp=self.stage,
            dp=self.alone,
            dp_cp=self.alone,
            dp_cp_gtp_remat=self.alone,
            dp_cp_ag=None,
            gtp_remat=self.alone,
            expt_gtp_remat=self.alone,
            expt_dp=self.alone,
            expt_dp_gtp_remat=self.alone,
            expt_dp_ag=None,
            intra_dp_cp=self.alone,
            intra_expt_dp=self.alone,
            inter_dist_opt=None,
            intra_dist_opt=self.world,
        )


def build_groups(plan: Plan, timeout: timedelta, variable_lengths: bool = False) -> RankGroups:
    """Create this rank's groups. Collective: every rank of the world calls it with equal plans.

    Args:
        plan: the plan.
        timeout: limit of every collective.
        variable_lengths: micro-batches have sequences of unlike lengths.
    """
    table = rank_table(plan)
    place = table[dist.get_rank()]
    ranks_of_stage: dict[tuple[int, int], list[int]] = {}
    for rank, position in enumerate(table):
        ranks_of_stage.setdefault((position.replica, position.stage), []).append(rank)
    alone = _own_group([[rank] for rank in range(len(table))], timeout)

    widths = {
        (r, s): stage.shape.tensor_parallel
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
    }
    tensor_groups = [
        ranks[start : start + widths[key]]
        for key, ranks in sorted(ranks_of_stage.items())
        for start in range(0, len(ranks), widths[key])
    ]
    context_groups = [
        ranks[first :: widths[key]]
        for key, ranks in sorted(ranks_of_stage.items())
        for first in range(widths[key])
        if len(ranks) > widths[key]
    ]
    stage_groups = [
        ranks for key, ranks in sorted(ranks_of_stage.items()) if len(ranks) > widths[key]
    ]
    tensor = _own_group(tensor_groups, timeout)
    context = _own_group(context_groups, timeout) or alone
    stage = _own_group(stage_groups, timeout) or tensor
    num_stages = [len(replica.stages) for replica in plan.replicas]
    hops = {}
    for r, replica in enumerate(plan.replicas):
        for boundary, (before, after) in enumerate(pairwise(chain(replica))):
            ranks = ranks_of_stage[r, before] + ranks_of_stage[r, after]
            num_groups = 3 if variable_lengths else 2
            hop = Hop(*(dist.new_group(ranks, timeout=timeout) for _ in range(num_groups)))
            if dist.get_rank() in ranks:
                hops[boundary] = hop
    on_last_stage = [r for r, p in enumerate(table) if p.stage == num_stages[p.replica] - 1]
    last_stages = dist.new_group(on_last_stage, timeout=timeout)
    return RankGroups(
        position=place,
        pipeline=PipelinePlace(place.stage, num_stages[place.replica]),
        world=dist.group.WORLD,
        tensor=tensor,
        tensor_ranks=tuple(dist.get_process_group_ranks(tensor)),
        context=context,
        context_ranks=tuple(dist.get_process_group_ranks(context)),
        stage=stage,
        copy=place.replica + len(plan.replicas) * place.context_rank,
        alone=alone,
        last_stages=last_stages if dist.get_rank() in on_last_stage else None,
        stage_ranks=tuple(
            StageRanks(
                tuple(ranks_of_stage[place.replica, s]),
                len(ranks_of_stage[place.replica, s]) // widths[place.replica, s],
            )
            for s in range(num_stages[place.replica])
        ),
        chain=chain(plan.replicas[place.replica]),
        hops=hops,
        timeout=timeout,
    )


def _own_group(groups: list[list[int]], timeout: timedelta) -> dist.ProcessGroup | None:
    """Create all `groups`, in order; return the one with this rank."""
    own = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout)
        if dist.get_rank() in ranks:
            own = group
    return own
