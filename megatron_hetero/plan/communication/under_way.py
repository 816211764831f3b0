"""How many messages of a boundary may be under way at a time, in each direction.

A communicator of NCCL runs its operations one after the other, and what waits there may hold up all
that its GPU is given later (`CUDA_DEVICE_MAX_CONNECTIONS=1`).  So each direction of a boundary has
as many communicators as messages that are under way, and uses them in turn: message k waits behind
message k - W, and behind nothing else.

W is half of P, the most micro-batches that are unanswered at the boundary (the activation is sent,
and its gradient not yet taken), because a receiver posts for W messages ahead of the one that it
takes, and a sender may have W more on their way.  With it no message ever waits behind another.
Suppose that message k did: the receiver has not posted for k - W, so it has taken k - 2W at most,
and has sent back no more gradients than that; but the sender, with P unanswered at most, has taken
k + 1 - P of them, and k + 1 - P > k - 2W.  The same holds of gradients, which are at most as many
as the activations before them.

Torch has 32 streams for its communicators, and two that share one can hang a job.  So W is never
more than 6: two neighbours with two directions each, and eight groups beside them.  A sender that
is more than twelve messages ahead then waits for its receiver, and the proof of the plan's
operations (`schedule.proof`), which counts W, says whether all of them end.

Where a message is announced (its shape goes ahead of it) receivers post for it when they take it,
none ahead, and W is P.
"""

from __future__ import annotations

from megatron_hetero.plan.chunks import chain
from megatron_hetero.plan.order import parse_order
from megatron_hetero.plan.plan import Plan, Replica

_MOST = 6
"""Communicators of a direction: of torch's 32 streams four directions leave eight to groups."""


def messages_under_way(plan: Plan, replica: int, announced: bool = False) -> tuple[int, ...]:
    """Return [boundary] -> the messages that may be under way in each direction.

    Args:
        plan: with valid schedules.
        replica: its place in the plan.
        announced: whether the shapes of messages go ahead of them.
    """
    return tuple(
        unanswered if announced else num_communicators(unanswered)
        for unanswered in _unanswered(plan.replicas[replica], announced)
    )


def num_communicators(unanswered: int) -> int:
    """Return W, the communicators of each direction of a boundary with so many unanswered
    micro-batches at most."""
    return min(-(-unanswered // 2), _MOST)


def _unanswered(replica: Replica, announced: bool) -> list[int]:
    """Return for each boundary the largest number of micro-batches between the send of an
    activation and the receipt of its gradient."""
    stages = replica.stages
    # The chunk that comes next on each stage, as the chain passes it again.
    num_chunks = dict.fromkeys(range(len(stages)), 0)
    found = []
    for stage in chain(replica)[:-1]:
        chunk, num_chunks[stage] = num_chunks[stage], num_chunks[stage] + 1
        order = stages[stage].order
        if order is None:
            # A 1F1B stage has as many unanswered as forwards it launches before its first backward.
            launched = stages[stage].num_launched_forwards or len(stages) - stage
            # Where lengths are unlike a step may be dealt to more micro-batches than the plan has.
            found.append(launched if announced else min(launched, replica.num_micro_batches))
            continue
        # Forwards of the chunk less its backward passes, and the most of that at any time.
        now = most = 0
        for letter, of_chunk in parse_order(order):
            if of_chunk == chunk:
                # The gradient of the input arrives with B or I; W needs no message.
                now += {"F": 1, "B": -1, "I": -1, "W": 0}[letter]
                most = max(most, now)
        found.append(most)
    return found
