"""Process groups of a rank, and its place in the plan (`parallel.building` makes them).

Collectives have the tensor-parallel group of each stage, the ranks among which experts are dealt
out (of several replicas too), the last stages together (the job's loss), and the world; for what a
rank does alone Megatron is given one group of this rank, which sends nothing.  A pipeline has no
group, because stages of unlike width have no common columns: `PipelinePlace` answers Megatron's two
questions, rank and size, and the two stages of a boundary have groups for each direction of their
messages (`parallel.boundary`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_hetero.plan.ranks import Position
from megatron_hetero.plan.sharding.stage_ranges import StageRanks
from megatron_hetero.runtime.parallel.context_place import ContextPlace


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

    There are several for each direction, which its messages use in turn: NCCL runs the messages of
    a group in order, and one that waits for its receiver must delay neither a gradient that this
    receiver sends nor what this rank computes (`plan.communication.under_way`). `shapes`, where
    sequences have unlike lengths, carry the shapes of the activations.
    """

    forward: tuple[dist.ProcessGroup, ...]
    backward: tuple[dist.ProcessGroup, ...]
    shapes: tuple[dist.ProcessGroup, ...] = ()


@dataclass(frozen=True)
class RankGroups:
    """Place of this rank, and the rank's process groups. Rank lists are global ranks."""

    position: Position
    pipeline: PipelinePlace
    world: dist.ProcessGroup
    tensor: dist.ProcessGroup
    tensor_ranks: tuple[int, ...]
    experts: dist.ProcessGroup
    """The ranks among which experts are dealt out, which have the same part of unlike experts."""
    expert_parts: dist.ProcessGroup
    """The ranks that each have a part of the same experts."""
    expert_ranks: dist.ProcessGroup
    """All ranks that hold every expert of the stage's layers once."""
    expert_copy: int
    """Number of the copy of the experts that this rank has a part of."""
    context: dist.ProcessGroup
    """Ranks with this rank's weights and different parts of the sequences."""
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
    num_communicators: int
    """Communicators of this rank that have more ranks; those of gradients are not among them."""
    timeout: timedelta
    """Limit of a collective, in every group; torch's default is not the user's."""

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline.stage == self.pipeline.num_stages - 1

    @property
    def messages_under_way(self) -> dict[int, int]:
        """Return the most messages that may be under way in a direction of each boundary."""
        return {boundary: len(hop.forward) for boundary, hop in self.hops.items()}

    @property
    def context_place(self) -> ContextPlace | None:
        """Return the tokens of this rank where its stage has unlike shares of sequences."""
        tokens = self.stage_ranks[self.pipeline.stage].tokens
        return None if tokens is None else ContextPlace(tokens, self.position.context_rank)

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
            ep=self.experts,
            expt_tp=self.expert_parts,
            tp_ep=self.expert_ranks,
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
