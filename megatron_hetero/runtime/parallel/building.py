"""The process groups of a rank, made from the plan in the same order on every rank.

`plan.communication.communicators` lists them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.communication.communicators import (
    INNER_USES,
    URGENT_USES,
    Communicator,
    Use,
    last_stage_ranks,
    model_communicators,
    stage_ranks,
)
from megatron_hetero.plan.plan import Plan, StageShape
from megatron_hetero.plan.ranks import Position, rank_table
from megatron_hetero.plan.sharding.expert_groups import expert_group_of
from megatron_hetero.plan.sharding.stage_ranges import StageRanks, crossing_pairs, told_pairs
from megatron_hetero.plan.sharding.token_shares import uneven_tokens
from megatron_hetero.runtime.parallel.connecting import (
    ALL_TO_ALL,
    COLLECTIVES,
    Connections,
    connect_world,
    make_group,
)
from megatron_hetero.runtime.parallel.groups import Hop, PipelinePlace, RankGroups


def build_groups(
    plan: Plan,
    timeout: timedelta,
    variable_lengths: bool = False,
    seq_length: int = 0,
    activation_elements: Collection[int] = (),
) -> RankGroups:
    """Create this rank's groups, and connect them (`connecting`). Collective: every rank of the
    world calls it with equal plans.

    All ranks make all groups in one order, as torch asks: a rank that is not in a group makes
    nothing, in microseconds.  `use_local_synchronization`, which would leave such ranks out, names
    a group after the number of groups that a rank has made, which then differs from rank to rank.

    Args:
        plan: the plan.
        timeout: limit of every collective.
        variable_lengths: micro-batches have sequences of unlike lengths.
        seq_length: tokens of a sequence, which unlike shares divide; other plans do not ask for it.
        activation_elements: of the whole activations that cross boundaries, which decide the ranks
            that exchange any; without them all ranks of two stages are connected.
    """
    # A group of each rank alone stands for what Megatron believes to be a collective.
    connect_world()
    table = rank_table(plan)
    rank = dist.get_rank()
    place = table[rank]
    made = [dist.new_group([other], timeout=timeout) for other in range(len(table))]
    alone = made[rank]
    # Ranks of every stage, with their parts of a sequence.
    stages = {
        (r, s): StageRanks(
            ranks,
            plan.replicas[r].stages[s].shape.context_parallel,
            uneven_tokens(plan.replicas[r].stages[s].shape, seq_length),
        )
        for (r, s), ranks in stage_ranks(plan).items()
    }
    # All communicators of the job, in the plan's order; keep those of this rank.
    own: dict[tuple[Use, int | None], tuple[dist.ProcessGroup, ...]] = {}
    for communicator in model_communicators(plan, variable_lengths):
        connections = _connections(communicator, plan, stages, activation_elements)
        group = make_group(
            communicator.ranks,
            timeout,
            str(communicator),
            connections,
            is_urgent=communicator.use in URGENT_USES,
        )
        if rank in communicator.ranks:
            key = communicator.use, communicator.boundary
            own[key] = (*own.get(key, ()), group)
    # A rank without a group for some use has another that stands for it.
    (tensor,) = own.get(("tensor", None), (alone,))
    (context,) = own.get(("context", None), (alone,))
    (stage,) = own.get(("stage", None), (tensor if context is alone else context,))
    # Copies are numbered replica by replica, first those of context-parallel rank 0.
    copy = place.replica + len(plan.replicas) * place.context_rank
    num_stages = len(plan.replicas[place.replica].stages)
    is_last = rank in last_stage_ranks(plan)
    return RankGroups(
        position=place,
        pipeline=PipelinePlace(place.stage, num_stages),
        world=dist.group.WORLD,
        tensor=tensor,
        tensor_ranks=tuple(dist.get_process_group_ranks(tensor)),
        **_expert_groups(plan, rank, own, tensor, alone, copy),
        context=context,
        context_ranks=tuple(dist.get_process_group_ranks(context)),
        stage=stage,
        copy=copy,
        alone=alone,
        last_stages=_loss_group(plan, own, alone) if is_last else None,
        stage_ranks=tuple(stages[place.replica, s] for s in range(num_stages)),
        chain=chain(plan.replicas[place.replica]),
        hops={
            boundary: Hop(forward, own["backward", boundary], own.get(("shapes", boundary), ()))
            for (use, boundary), forward in own.items()
            if use == "forward" and boundary is not None
        },
        # The world counts as well, unless this rank is alone.
        num_communicators=sum(map(len, own.values())) + (len(table) > 1),
        timeout=timeout,
    )


def _expert_groups(
    plan: Plan,
    rank: int,
    own: Mapping[tuple[Use, int | None], tuple[dist.ProcessGroup, ...]],
    tensor: dist.ProcessGroup,
    alone: dist.ProcessGroup,
    copy: int,
) -> dict[str, Any]:
    """Return the fields of `RankGroups` that tell of experts.

    Args:
        own: this rank's groups by use.
        copy: of the rest of the model.
    """
    # Whole experts are dealt out inside the tensor-parallel group.
    if _shape(plan, rank_table(plan)[rank]).expert_shares is not None:
        return {
            "experts": tensor,
            "expert_parts": alone,
            "expert_ranks": tensor,
            "expert_copy": copy,
        }
    group = expert_group_of(plan, rank)
    # No group for experts: each rank of the tensor-parallel group has a part of every expert.
    if group is None:
        return {
            "experts": alone,
            "expert_parts": tensor,
            "expert_ranks": tensor,
            "expert_copy": copy,
        }
    # Experts are dealt out over replicas: find the group with the right ranks among those made.
    inner = [one for use in INNER_USES for one in own.get((use, None), ())]
    of_ranks = {tuple(dist.get_process_group_ranks(one)): one for one in (alone, *inner)}
    first, part = group.place(rank)
    return {
        "experts": of_ranks[group.dealt[part]],
        "expert_parts": of_ranks[group.divided[first]],
        "expert_ranks": of_ranks[group.ranks],
        "expert_copy": group.copy,
    }


def _shape(plan: Plan, place: Position) -> StageShape:
    return plan.replicas[place.replica].stages[place.stage].shape


def _connections(
    communicator: Communicator,
    plan: Plan,
    stages: Mapping[tuple[int, int], StageRanks],
    activation_elements: Collection[int],
) -> Connections:
    """Return the connections of a communicator."""
    place = rank_table(plan)[communicator.ranks[0]]
    # Inside a stage; only all-to-alls need a connection between every two ranks.
    if communicator.boundary is None:
        shape = _shape(plan, place)
        deals = shape.expert_shares is not None or shape.expert_groups is not None
        exchanges = communicator.use in ("context", "stage", "experts") or (
            communicator.use == "tensor" and deals
        )
        return ALL_TO_ALL if exchanges else COLLECTIVES
    # Across a boundary: the ranks of two neighbours in the chain of model chunks.
    chained = chain(plan.replicas[place.replica])
    before, after = (
        stages[place.replica, chained[b]]
        for b in (communicator.boundary, communicator.boundary + 1)
    )
    if communicator.use == "shapes":
        return Connections.of_messages(told_pairs(before, after))
    crossing = crossing_pairs(before, after, activation_elements)
    # Gradients go back over the pairs of ranks by which activations came.
    if communicator.use == "backward":
        crossing = {(receiver, sender) for sender, receiver in crossing}
    return Connections.of_messages(crossing)


def _loss_group(
    plan: Plan,
    own: Mapping[tuple[Use, int | None], tuple[dist.ProcessGroup, ...]],
    alone: dist.ProcessGroup,
) -> dist.ProcessGroup:
    """Return the group of all ranks of last stages: a new one, unless it is this rank or the
    world."""
    last = last_stage_ranks(plan)
    if len(last) == 1:
        return alone
    return dist.group.WORLD if len(last) == dist.get_world_size() else own["losses", None][0]
