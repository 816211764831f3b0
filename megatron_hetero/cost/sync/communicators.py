"""Communicators of every rank of a job, and NCCL's buffers for these.

The gradient exchange has one communicator for each set of ranks that hold the same slices
(`cost.sync.holders`).  Where a plan has groups of machines, ranks that sum two by two have one for
the two of them.

NCCL keeps buffers for each connection of a channel (`cost.memory.libraries`).  The number of
channels it chooses by what it finds between the GPUs, so bytes are given for one; the memory of a
stage has them for the usual number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from megatron_hetero.cost.memory.libraries import CONNECTION_BYTES
from megatron_hetero.cost.sync.holders import gradient_holders
from megatron_hetero.exchange.groups.by_group import plan_by_group
from megatron_hetero.exchange.groups.pairs import pair_sums
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.communication.communicators import (
    Communicator,
    Use,
    model_communicators,
    stage_ranks,
)
from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_machines, rank_table


@dataclass(frozen=True)
class RankCommunicators:
    """Communicators of a rank, each of two ranks or more.

    `num_connections`: to the neighbours in a ring of each collective's, and to the ranks with which
    a boundary's exchanges pieces; each way counts.
    """

    rank: int
    uses: tuple[Use, ...]
    num_connections: int

    @property
    def bytes_per_channel(self) -> int:
        """Return the bytes of NCCL's buffers for each open channel."""
        return self.num_connections * CONNECTION_BYTES


def job_communicators(plan: Plan, workload: Workload) -> tuple[Communicator, ...]:
    """Return all communicators of a job that the project's own runtime trains."""
    # Ranks of the job; the distributed optimizer exchanges to owners, and sums in no pairs.
    world = tuple(range(plan.layout.num_devices))
    holders = gradient_holders(plan, workload)
    is_divided = workload.training.use_distributed_optimizer
    pairs = () if is_divided else summing_pairs(plan, holders)
    return (
        *((Communicator("world", world),) if len(world) > 1 else ()),
        *model_communicators(plan),
        *(Communicator("gradients", ranks) for ranks in dict.fromkeys((*holders, *pairs))),
    )


def by_rank(plan: Plan, workload: Workload) -> tuple[RankCommunicators, ...]:
    """Return [rank] -> the rank's communicators and connections."""
    ranks_of = stage_ranks(plan)
    # Uses and connections by rank, filled communicator by communicator.
    places = rank_table(plan)
    uses: list[list[Use]] = [[] for _ in places]
    connections = [0] * len(places)
    for communicator in job_communicators(plan, workload):
        for rank in communicator.ranks:
            uses[rank].append(communicator.use)
            if communicator.boundary is None:
                # One neighbour to send to and one to receive from; of two ranks they are the same.
                connections[rank] += 2
            # A boundary exchanges pieces with the ranks that overlap the rank's own range.
            else:
                place = places[rank]
                own = len(ranks_of[place.replica, place.stage])
                connections[rank] += _num_peers(own, len(communicator.ranks) - own)
    return tuple(
        RankCommunicators(rank, tuple(uses[rank]), connections[rank]) for rank in range(len(places))
    )


def _num_peers(own: int, theirs: int) -> int:
    """Count the most ranks of the peer stage that overlap a single range of `own` equal ranges."""
    # Ranges of a tensor as fractions, which are exact for unlike numbers of ranks.
    edges = [Fraction(i, theirs) for i in range(theirs + 1)]
    return max(
        sum(low < Fraction(i + 1, own) and Fraction(i, own) < high for low, high in pairwise(edges))
        for i in range(own)
    )


def summing_pairs(plan: Plan, holders: Iterable[tuple[int, ...]]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of ranks that sum in all-reduces by groups of machines, each pair once, in
    the order of the communicators.

    Args:
        plan: without groups it has none.
        holders: of the buckets.
    """
    if not plan.exchange_groups:
        return ()
    machines = rank_machines(plan)
    found: dict[tuple[int, int], None] = {}
    # Machines of the holders decide the plan of their exchange, and so who sums with whom.
    for ranks in dict.fromkeys(holders):
        names = [machines[rank] for rank in ranks]
        exchange = plan_by_group(
            names,
            plan.exchange_groups,
            _ELEMENTS,
            "all_reduce",
            uplinks=plan.exchange_uplinks,
        )
        sums = {} if exchange is None else pair_sums(exchange)
        pairs = sorted({own.holders for own in sums.values()})
        found |= dict.fromkeys((ranks[one], ranks[other]) for one, other in pairs)
    return tuple(found)


_ELEMENTS = 1 << 20
"""Elements of the bucket by which pairs are found; every bucket cut alike has the same pairs."""
