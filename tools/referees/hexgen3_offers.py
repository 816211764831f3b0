"""HexGen-3's prices as a problem of composition: our programme optimises what its estimator scores.

Its rules: cards of each type up to a capacity; a request takes prefill, attention and feed-forward;
attention and feed-forward have equally many replicas.  Expert parallelism wider than a replica
spans replicas of one width: no other feed-forward replica may then stand on that card type.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from megatron_hetero.serving.compose.problem import Composing, Offer, Rentable, Resource
from tools.referees.hexgen3 import NODE_GPUS, ROLES, HexGen3, Replica


def composing(referee: HexGen3, capacity: Mapping[str, int], num_experts: int = 1) -> Composing:
    """Return the search space of HexGen-3 as a problem.

    Args:
        referee: prices replicas.
        capacity: cards of each type.
        num_experts: of the model; 1 turns expert parallelism off.
    """
    replicas = [
        Replica(role, card, width, experts)
        for card in sorted(capacity)
        for role in ROLES
        for width in range(1, min(NODE_GPUS, capacity[card]) + 1)
        for experts in _degrees(role, width, num_experts)
    ]
    offers = []
    for replica in replicas:
        rate = referee.throughput(replica)
        if rate > 0:
            offers.append(
                Offer(_name(replica), replica.role, "all", (rate,), {replica.card: replica.width})
            )
    names = {offer.name for offer in offers}
    conflicts = tuple(
        (_name(a), _name(b))
        for a, b in combinations(replicas, 2)
        if a.role == b.role == "ffn"
        and a.card == b.card
        and (a.experts > a.width or b.experts > b.width)
        and {_name(a), _name(b)} <= names
    )
    return Composing(
        tuple(offers),
        tuple(Rentable(card, number) for card, number in sorted(capacity.items())),
        tuple(Resource(card, card, 1) for card in sorted(capacity)),
        demand=(1.0,),
        class_names=("all",),
        routes=(ROLES,),
        conflicts=conflicts,
        equal_counts=(("attn", "ffn"),),
    )


def replica_of(name: str) -> Replica:
    """Return the replica of an offer's name."""
    role, card, width, experts = name.split("/")
    return Replica(role, card, int(width), int(experts))


def _name(replica: Replica) -> str:
    return f"{replica.role}/{replica.card}/{replica.width}/{replica.experts}"


def _degrees(role: str, width: int, num_experts: int) -> list[int]:
    """Return the degrees of expert parallelism of a replica: within it, or over several."""
    if role != "ffn" or num_experts == 1:
        return [1]
    return [
        degree
        for degree in range(1, min(NODE_GPUS, num_experts) + 1)
        if num_experts % degree == 0 and (width % degree == 0 or degree % width == 0)
    ]
