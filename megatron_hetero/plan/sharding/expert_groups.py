"""Groups of ranks that deal experts out over replicas (`StageShape.expert_groups`).

The ranks of a group work in step: in every layer each sends its tokens to the experts of the
others.  So a group that is larger than a stage is of replicas whose stages are alike: equal layers,
equal passes in equal order.  Elsewhere in the pipeline these replicas may differ.  Alike stages
come together in the order of the replicas, as many as make a group; where all replicas are equal
these are the groups of stock Megatron (`parallel_state.RankGenerator`, order tp-ep-dp-pp).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from megatron_hetero.plan.in_flight import num_in_flight
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table


@dataclass(frozen=True)
class ExpertGroup:
    """Ranks that together hold every expert of their layers once.

    Attributes:
        ranks: global ranks, those that divide an expert beside each other.
        size: parts into which the experts of a layer are dealt, stock Megatron's EP.
        width: ranks that divide each expert of a part, stock Megatron's ETP.
        copy: number of the group among all in the job that hold the same experts; 0 is the first.
    """

    ranks: tuple[int, ...]
    size: int
    width: int
    copy: int

    @property
    def dealt(self) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks that have the same part of unlike experts."""
        return tuple(self.ranks[part :: self.width] for part in range(self.width))

    @property
    def divided(self) -> tuple[tuple[int, ...], ...]:
        """Return the sets of ranks that divide the same experts."""
        return tuple(
            self.ranks[first : first + self.width]
            for first in range(0, len(self.ranks), self.width)
        )

    def place(self, rank: int) -> tuple[int, int]:
        """Return the part of the experts that a rank holds, and the rank's place among those that
        divide each of these experts."""
        return divmod(self.ranks.index(rank), self.width)


def stages_in_group(expert_groups: tuple[int, int] | None, num_devices: int) -> int:
    """Return the number of stages, of as many replicas, that one group of experts takes.

    Args:
        expert_groups: as `StageShape.expert_groups`.
        num_devices: of each such stage.
    """
    size, width = expert_groups or (1, 1)
    # A group within a stage takes that stage alone; a larger one takes several.
    return max(1, size * width // num_devices)


def expert_peers(plan: Plan) -> dict[tuple[int, int], tuple[int, ...]]:
    """Find the replicas whose ranks form groups of experts together, for each stage that deals
    experts out over replicas.

    Returns:
        (replica, stage) -> replicas, itself among them; fewer than `stages_in_group` where too few
        stages are alike, which `experts_over_replicas_meet` refuses.
    """
    return alike_peers(
        (r, s, stages_in_group(groups, stage.shape.num_devices), _in_step(plan, r, s))
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        if (groups := stage.shape.expert_groups) is not None
    )


def alike_peers(
    stages: Iterable[tuple[int, int, int, Hashable]],
) -> dict[tuple[int, int], tuple[int, ...]]:
    """Find who form groups of experts together among stages that deal experts out over replicas.

    Args:
        stages: replica and place of each stage, replicas rising; the number of stages in its group;
            and what stages of one group have in common.
    Returns:
        As `expert_peers`.
    """
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    # Groups that lack members, by stage and by what their stages have in common.
    open_groups: dict[Hashable, list[int]] = {}
    for r, s, number, in_step in stages:
        group = open_groups.setdefault((s, in_step), [])
        group.append(r)
        # Every member sees the group as it is so far, so that a short one is known at the end.
        found.update({(peer, s): tuple(group) for peer in group})
        # A full group is closed, and the next stage of its kind opens another.
        if len(group) == number:
            del open_groups[s, in_step]
    return found


def _in_step(plan: Plan, r: int, s: int) -> Hashable:
    """Return what stages have in common whose ranks pass tokens to each other in every layer."""
    replica = plan.replicas[r]
    stage = replica.stages[s]
    # Stages of one group run the same passes in the same order, or their exchanges hang.
    return (
        *(stage.shape, stage.first_layer, stage.chunks, stage.precision),
        *(stage.recompute, stage.recompute_num_layers),
        stage.order or num_in_flight(plan, r, s),
        *(replica.num_micro_batches, replica.micro_batch_size),
    )


def expert_groups(plan: Plan) -> tuple[ExpertGroup, ...]:
    """Return all groups of experts over replicas of a valid plan, in the order of their first
    stages."""
    ranks_of: dict[tuple[int, int], list[int]] = {}
    for rank, place in enumerate(rank_table(plan)):
        ranks_of.setdefault((place.replica, place.stage), []).append(rank)
    return tuple(_groups(plan, ranks_of))


def _groups(plan: Plan, ranks_of: Mapping[tuple[int, int], list[int]]) -> Iterator[ExpertGroup]:
    for (r, s), peers in expert_peers(plan).items():
        # A set of peers is met once for each member, and counted at its first.
        if r != peers[0]:
            continue
        size, width = plan.replicas[r].stages[s].shape.expert_groups or (1, 1)
        # Ranks of all peers, replica by replica; groups are consecutive parts of these.
        ranks = [rank for peer in peers for rank in ranks_of[peer, s]]
        for index, first in enumerate(range(0, len(ranks), size * width)):
            # Numbers of copies differ among all groups with the same experts.
            copy = r + len(plan.replicas) * index
            yield ExpertGroup(tuple(ranks[first : first + size * width]), size, width, copy)


def expert_group_of(plan: Plan, rank: int) -> ExpertGroup | None:
    """Return the group of experts over replicas that a rank is in; None where its stage deals none
    out so."""
    return next((group for group in expert_groups(plan) if rank in group.ranks), None)
