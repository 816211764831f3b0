"""Time and memory of a plan's replicas for the tokens of a sequence, and the price as a group.

A replica may be a pipeline.  It takes as long as its slowest stage or boundary, and holds as much
as its fullest GPU, at any length: a token costs what it costs where it is dearest, and so do pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_hetero.cluster.nodes import Device
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.cost.model import CostModel
from megatron_hetero.cost.parameters import attention_sizes
from megatron_hetero.cost.placement import PlacedReplica, PlacedStage, Placement
from megatron_hetero.cost.share import member_shares
from megatron_hetero.cost.step_cost import ReplicaCost
from megatron_hetero.cost.work.fused_attention import uses_flash_attention
from megatron_hetero.cost.work.profile import Profile
from megatron_hetero.model.recompute import recomputed
from megatron_hetero.model.spec import Workload
from megatron_hetero.sequences.pipelines import StageRates
from megatron_hetero.sequences.price.exchange import all_to_all_s, into_domains_s
from megatron_hetero.sequences.price.modelled import (
    EXCHANGED,
    Domain,
    ModelledPrice,
    exchanged_bytes,
    share_rules,
)
from megatron_hetero.sequences.price.token_rates import (
    ASKED_LENGTHS,
    LEAST_TOKEN_S,
    TokenRates,
    at_length,
    by_length,
)


@dataclass(frozen=True)
class ReplicaRates:
    """`rates` of a replica, in the bytes of its fullest GPU.

    Attributes:
        gathered_bytes: what the gathered keys and values of a token of a sequence take there.
        stages: of the replica.
    """

    rates: TokenRates
    gathered_bytes: float
    stages: tuple[StageRates, ...]


def replica_rates(
    cluster: Cluster, workload: Workload, placement: Placement, profile: Profile | None = None
) -> tuple[ReplicaRates, ...]:
    """Price tokens on every replica of a placement.

    Args:
        cluster: the machines.
        workload: its sequence length and micro-batch size do not matter.
        placement: of a plan, each replica with as many micro-batches as fill its pipeline.
        profile: measured times.
    """
    # [length][replica]: the model of a step at each of the asked lengths.
    costs = [_costs(cluster, at_length(workload, n), placement, profile) for n in ASKED_LENGTHS]
    return tuple(
        _rates(cluster, workload, replica, of_lengths)
        for replica, *of_lengths in zip(placement.replicas, *costs, strict=True)
    )


def _costs(
    cluster: Cluster, workload: Workload, placement: Placement, profile: Profile | None
) -> list[ReplicaCost]:
    costs = CostModel(cluster, workload, profile)
    rows, sharded = costs.vocab_rows(placement.widths), costs.sharded_as(placement)
    return [sharded.replica(replica, rows) for replica in placement.replicas]


def _rates(
    cluster: Cluster,
    workload: Workload,
    replica: PlacedReplica,
    costs: Sequence[ReplicaCost],
) -> ReplicaRates:
    # Seconds of stages and hops, for which the slowest counts.
    stages = tuple(_stage(costs, s) for s in range(len(replica.stages)))
    seconds = [(of.fixed_s, of.token_s, of.square_s) for of in stages]
    seconds += [_busy_hop(costs, boundary) for boundary in range(len(stages) - 1)]
    # Memory of every GPU of the replica.
    gpus = [cluster.gpu_type(device) for stage in replica.stages for device in stage.devices]
    held = _held(workload, replica, costs)
    room_bytes = min(of.room_bytes for of in held)
    # In the bytes of the GPU with the least room.
    scales = [room_bytes / of.room_bytes if room_bytes > 0 else 1.0 for of in held]

    def fullest(sizes: Iterable[float]) -> float:
        return max(size * scale for size, scale in zip(sizes, scales, strict=True))

    return ReplicaRates(
        TokenRates(
            " > ".join(dict.fromkeys(gpu.name for gpu in gpus)),
            max(LEAST_TOKEN_S, *(of_token for _, of_token, _ in seconds)),
            # A causal sequence has half of its square of pairs.
            2 * max(0.0, *(of_square for *_, of_square in seconds)),
            max(fixed for fixed, *_ in seconds),
            fullest(of.token_bytes for of in held),
            max(fullest(of.pair_bytes for of in held), 0.0),
            room_bytes,
            all(uses_flash_attention(workload.model, workload.training, gpu) for gpu in gpus),
            all(stage.measured for cost in costs for stage in cost.stages),
        ),
        fullest(of.gathered_bytes for of in held),
        stages,
    )


def _stage(costs: Sequence[ReplicaCost], index: int) -> StageRates:
    """Return the rates of a stage and of the boundary behind it."""
    passes = costs[0].stages[index].times
    hops_s = [0.0] * len(costs)
    if index < len(costs[0].forward_hops):
        # There and back at once: `crossing_s` is one direction, so the mean of both.
        both = [(c.forward_hops[index], c.backward_hops[index]) for c in costs]
        hops_s = [(there.total_s + back.total_s) / 2 for there, back in both]
    return StageRates(
        *by_length([cost.stages[index].times.total_s for cost in costs]),
        passes.forward_s / passes.total_s,
        *by_length(hops_s)[:2],
    )


def _busy_hop(costs: Sequence[ReplicaCost], boundary: int) -> tuple[float, float, float]:
    """Return for how long a boundary is busy in the slower of its two directions; others may be
    under way behind."""
    both = [(c.forward_hops[boundary], c.backward_hops[boundary]) for c in costs]
    return by_length([max(hop.serialisation_s for hop in hops) for hops in both])


class _Held(NamedTuple):
    """Bytes on one GPU: room for activations, and what tokens and pairs take of it."""

    room_bytes: float
    token_bytes: float
    pair_bytes: float
    gathered_bytes: float


def _held(workload: Workload, replica: PlacedReplica, costs: Sequence[ReplicaCost]) -> list[_Held]:
    """Return the bytes of every GPU of a replica, with all of its micro-batches in flight."""
    found = []
    for s, stage in enumerate(replica.stages):
        # What is recomputed gathers them again, layer by layer.
        keeps = not _attends_again(workload, stage)
        times = stage.num_layers * replica.num_in_flight[s] if keeps else 1
        for i, key_value_bytes in enumerate(_key_value_bytes(workload, stage)):
            memories = [cost.stages[s].device_memory(i) for cost in costs]
            peaks = [float(memory.training_bytes(stage.num_layers)) for memory in memories]
            fixed, token, pair = by_length(peaks)
            room_bytes = memories[0].capacity_bytes - fixed
            found.append(_Held(room_bytes, token, pair, times * key_value_bytes))
    return found


def _attends_again(workload: Workload, stage: PlacedStage) -> bool:
    return "core_attn" in recomputed(workload.training, stage.recompute)


def _key_value_bytes(workload: Workload, stage: PlacedStage) -> list[int]:
    """Return the bytes of a token's keys and values in one layer, on each GPU of a stage."""
    shares = member_shares(workload.model, stage.width, stage.shares)
    element = workload.training.element_bytes
    return [2 * attention_sizes(workload.model, share)[1] * element for share in shares]


def group_prices(
    cluster: Cluster,
    workload: Workload,
    replicas: Sequence[PlacedReplica],
    rates: Sequence[ReplicaRates],
) -> tuple[ModelledPrice, ...]:
    """Price a group of replicas whose stages are alike: of each sequence every replica has a part,
    and stage by stage they gather keys and values, or equal ones exchange heads.

    Args:
        cluster: whose links join them.
        workload: model and training.
        replicas: the group.
        rates: of each.
    """
    # Stage by stage, the replicas exchange keys and values.
    like_stages = list(zip(*(replica.stages for replica in replicas), strict=True))
    waits = [_waits(cluster, workload, stages) for stages in like_stages]
    gathers = len(replicas) > 1
    # A price for each rule of shares, by the slowest stage.
    found = [
        ModelledPrice(
            tuple(Domain(of.rates, 1) for of in rates),
            "gather",
            tuple(max(of) for of in zip(*(seconds for seconds, _ in waits), strict=True)),
            max(of.gathered_bytes for of in rates) if gathers else 0.0,
            max(latency_s for _, latency_s in waits),
            rule=rule,
        )
        for rule in share_rules("balanced", [of.rates for of in rates])
    ]
    # Equal replicas may exchange heads instead.
    are_equal = gathers and len({of.rates for of in rates}) == 1
    if are_equal and all(_divide_heads(workload, stages) for stages in like_stages):
        exchanges = [_exchange(cluster, workload, stages) for stages in like_stages]
        busy_s, latency_s = (max(of) for of in zip(*exchanges, strict=True))
        domain = Domain(rates[0].rates, len(rates), busy_s, latency_s)
        found.append(ModelledPrice((domain,), "gather", (0.0,), 0.0, 0.0))
    return tuple(found)


def _divide_heads(workload: Workload, stages: Sequence[PlacedStage]) -> bool:
    """Tell if like stages of as many replicas can exchange whole query groups of every GPU."""
    width, shares = stages[0].width, stages[0].shares
    is_even = shares is None or len(set(shares)) == 1
    return is_even and workload.model.num_query_groups % (width * len(stages)) == 0


def _exchange(
    cluster: Cluster, workload: Workload, stages: Sequence[PlacedStage]
) -> tuple[float, float]:
    """Return the seconds in which like stages exchange a token's heads in all passes, and the
    latency of all rounds; the heads of all GPUs of a stage go over the links of its first one."""
    model, first = workload.model, stages[0]
    passes = first.num_layers * _num_passes(workload, stages)
    carried = exchanged_bytes(model, workload.training.element_bytes)
    busy_s, latency_s = all_to_all_s(cluster, [stage.devices[0] for stage in stages])
    return passes * carried * busy_s, passes * EXCHANGED * latency_s


def _num_passes(workload: Workload, stages: Sequence[PlacedStage]) -> int:
    """Return how often a micro-batch exchanges in each layer: forward, backward, recomputed."""
    return 2 + any(_attends_again(workload, s) for s in stages)


def _waits(
    cluster: Cluster, workload: Workload, stages: Sequence[PlacedStage]
) -> tuple[list[float], float]:
    """Return the seconds in which each of the like stages receives a token's keys and values, in
    all passes, and the latency of all rounds.

    The heads of all GPUs of a stage come over the links of its first one.
    """
    first = stages[0]
    num_passes = _num_passes(workload, stages)
    own: list[Device] = [stage.devices[0] for stage in stages]
    into, latency_s = into_domains_s(cluster, own, [[i] for i in range(len(own))])
    carried = sum(_key_value_bytes(workload, first)) * first.num_layers * num_passes
    rounds = (len(own) - 1) * first.num_layers * num_passes
    return [carried * seconds for seconds in into], rounds * latency_s
