"""Sets of ranks that share a communicator, in the order of creation on all ranks.

The runtime makes the groups of this list (`runtime.parallel.building`), and those of the gradient
exchange after it (`cost.sync.holders` finds its ranks from the model); the count of a rank stands
in `explain`.  A rank is named in a list only where it sends something: a stage of one rank has no
tensor-parallel group, one group of tensor-parallel ranks no context-parallel one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.communication.under_way import messages_under_way
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.plan.sharding.expert_groups import expert_groups

Use = Literal[
    "tensor",
    "context",
    "stage",
    "experts",
    "sequences",
    "forward",
    "backward",
    "shapes",
    "losses",
    "gradients",
    "world",
]
DIRECTIONS: tuple[Use, ...] = ("forward", "backward", "shapes")
"""Uses of a boundary; shapes of activations only where sequences have unlike lengths."""

INNER_USES: tuple[Use, ...] = ("tensor", "context", "stage", "experts")
"""Uses of communicators in which a pass over the layers of a stage exchanges."""

CHANNELS_OF_MESSAGES = 2
"""Most channels of a communicator that carries messages: each takes buffers and a part of the GPU,
and several of these communicators are busy at a time."""

MESSAGE_USES = frozenset(DIRECTIONS)
"""Uses of communicators that carry messages and no collectives."""

URGENT_USES = frozenset({"forward", "shapes"})
"""Uses whose communicators have streams of high priority.  torch has 32 streams of each priority,
so that pipelines of up to some thirty stages have one for each communicator of a direction."""


@dataclass(frozen=True)
class Communicator:
    """Communicator of two or more `ranks`, in the order of the numbers in the group.

    `boundary` is the place of a boundary in its replica's chain of chunks; None for other uses.  A
    direction of a boundary has several communicators, which its messages use in turn; `turn` is the
    communicator's number among these.
    """

    use: Use
    ranks: tuple[int, ...]
    boundary: int | None = None
    turn: int = 0

    def __str__(self) -> str:
        where = "" if self.boundary is None else f" messages of boundary {self.boundary}"
        return f"{self.use}{where}"


def model_communicators(plan: Plan, variable_lengths: bool = False) -> tuple[Communicator, ...]:
    """Return all communicators but the gradients' and the whole job's, in the order of making.

    Args:
        variable_lengths: whether micro-batches have sequences of unlike lengths.
    """
    ranks_of = stage_ranks(plan)
    # Every rank makes its communicators in this one order: making one waits for all its ranks.
    # Inside stages: tensor-parallel groups, context-parallel ones, and all of a stage.
    stages = [(key, ranks, _width(plan, key)) for key, ranks in sorted(ranks_of.items())]
    found = [
        Communicator("tensor", ranks[start : start + width])
        for _, ranks, width in stages
        for start in range(0, len(ranks), width)
    ]
    # Stages with context parallelism: several tensor-parallel groups.
    with_context = [(ranks, width) for _, ranks, width in stages if len(ranks) > width]
    # Ranks with the same place in their groups hold the same weights.
    found += [
        Communicator("context", ranks[first::width])
        for ranks, width in with_context
        for first in range(width)
    ]
    # With width 1 a stage's ranks are one context-parallel group already.
    found += [Communicator("stage", ranks) for ranks, width in with_context if width > 1]
    found += _of_experts(plan, {one.ranks for one in found})
    for r, replica in enumerate(plan.replicas):
        turns = messages_under_way(plan, r, variable_lengths)
        for boundary, (before, after) in enumerate(pairwise(chain(replica))):
            # Both sides of the boundary, so that any rank can send to any other.
            ranks = ranks_of[r, before] + ranks_of[r, after]
            found += [
                # Shapes travel ahead only where lengths differ from one micro-batch to the next.
                Communicator(direction, ranks, boundary, turn)
                for direction in DIRECTIONS[: 3 if variable_lengths else 2]
                for turn in range(turns[boundary])
            ]
    # Last stages together, for the losses.
    last = last_stage_ranks(plan)
    # If all ranks are in last stages, the whole job's communicator serves.
    if len(last) < plan.layout.num_devices:
        found.append(Communicator("losses", last))
    # A communicator of one rank would exchange with itself.
    return tuple(one for one in found if len(one.ranks) > 1)


def _of_experts(plan: Plan, known: Collection[tuple[int, ...]]) -> list[Communicator]:
    """Return the communicators of experts that are dealt out over replicas: of whole groups, of
    ranks with unlike experts, of ranks that divide the same ones.

    Args:
        known: sets of ranks that have a communicator inside of their stage, which serves both.
    """
    groups = expert_groups(plan)
    sets = [group.ranks for group in groups]
    sets += [ranks for group in groups for ranks in (*group.dealt, *group.divided)]
    return [Communicator("experts", ranks) for ranks in dict.fromkeys(sets) if ranks not in known]


def stage_ranks(plan: Plan) -> dict[tuple[int, int], tuple[int, ...]]:
    """Return (replica, stage) -> its ranks, tensor-parallel rank fastest."""
    # Ranks rise, so those of a stage come in the order of its places.
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for rank, place in enumerate(rank_table(plan)):
        key = place.replica, place.stage
        found[key] = (*found.get(key, ()), rank)
    return found


def last_stage_ranks(plan: Plan) -> tuple[int, ...]:
    """Return the ranks of the last stages of all replicas: where losses are known."""
    last = [len(replica.stages) - 1 for replica in plan.replicas]
    return tuple(
        rank for rank, place in enumerate(rank_table(plan)) if place.stage == last[place.replica]
    )


def _width(plan: Plan, key: tuple[int, int]) -> int:
    replica, stage = key
    return plan.replicas[replica].stages[stage].shape.tensor_parallel
