"""Stages with a common exchange of gradients: runs of layers with the same holders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

from megatron_hetero.cost.parameters import (
    embedding_params,
    further_params,
    layer_params,
    routed_params,
)
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.cost.sync.buckets import (
    MAX_BUCKET_ELEMENTS,
    StageId,
    holders_of_experts,
    layer_tensors,
)
from megatron_hetero.cost.sync.room import num_copies, part_of_room
from megatron_hetero.hashed import value
from megatron_hetero.model.spec import ModelSpec


@value(frozen=True)
class SyncGroup:
    """Stages with the same parameters, and the number of parameters (unsharded).

    A backward pass completes them layer by layer, down to `first_layer`; what comes before the
    layers is complete with the first of them, what follows them has none.
    """

    holders: tuple[StageId, ...]
    num_params: int
    first_layer: int = 0
    num_layers: int = 0


def sync_groups(placement: Placement, model: ModelSpec, vocab_rows: int) -> Iterator[SyncGroup]:
    """Yield parameters by set of holders, in the order in which a backward pass finishes the
    parameters: output layer, deep layers first, embedding. What one tensor-parallel group holds
    alone needs no exchange."""
    for group in _groups(placement, model, vocab_rows):
        r, s = group.holders[0]
        if len(group.holders) > 1 or placement.replicas[r].stages[s].context_parallel > 1:
            yield group


def _groups(placement: Placement, model: ModelSpec, vocab_rows: int) -> Iterator[SyncGroup]:
    # Output layer first, then layers from the deepest, then the embedding.
    replicas = placement.replicas
    first_stages = tuple((r, 0) for r in range(len(replicas)))
    last_stages = tuple((r, len(replica.stages) - 1) for r, replica in enumerate(replicas))
    words = vocab_rows * model.hidden_size
    behind = further_params(model, even_share(model, 1))
    if not model.tied_embeddings:
        behind += words
    if behind:
        yield SyncGroup(last_stages, behind, model.num_layers)
    yield from _layer_groups(placement, model)
    # The last stage has the words too as its output layer, and all embeddings to predict further.
    holders = last_stages if model.copies_words else ()
    before = words + (embedding_params(model, 1, 0) if model.mtp_num_layers else 0)
    yield SyncGroup(tuple(sorted(set(first_stages + holders))), before)


def _layer_groups(placement: Placement, model: ModelSpec) -> Iterator[SyncGroup]:
    """Yield the runs of layers with the same holders, deepest first; before each run the experts
    that stages of it deal out over replicas, with the holders of each part."""
    replicas = placement.replicas
    # Between two cuts every replica has one stage: the layers have the same holders.
    cuts = sorted({start for r in replicas for start in r.first_layers} | {model.num_layers})
    per_layer = layer_params(model, even_share(model, 1))
    # Stages of each replica that hold the layers from a cut on, the last such stage last.
    left = [[(r, s) for s in range(len(replica.stages))] for r, replica in enumerate(replicas)]
    starts = [replica.first_layers for replica in replicas]
    for first, end in reversed(list(pairwise(cuts))):
        for own, start in zip(left, starts, strict=True):
            while start[len(own) - 1] > first:
                own.pop()
        holders = tuple([own[-1] for own in left])
        # Sharded layers are exchanged in the passes themselves; all replicas have the same ones.
        num_sharded = replicas[0].stages[holders[0][1]].num_sharded_layers
        num_layers = end - first - num_sharded
        # Positions travel with the first layers, which the same stages hold; further tokens are
        # embedded on last stages too, so there positions go with the words.
        is_alone = bool(first or model.mtp_num_layers)
        positions = 0 if is_alone else embedding_params(model, 1, 0)
        size = num_layers * per_layer + positions
        # Of experts dealt out over replicas each part lies on some of the stages alone.
        if num_layers and any(replicas[r].stages[s].experts is not None for r, s in holders):
            parts = Counter(holders_of_experts(placement, holders))
            of_part = num_layers * routed_params(model) // parts.total()
            for held in [held for held in parts if held != holders]:
                size -= parts[held] * of_part
                yield SyncGroup(held, parts[held] * of_part, first + num_sharded, num_layers)
        if size:
            yield SyncGroup(holders, size, first + num_sharded, num_layers)


def groups_of(placement: Placement, holders: Sequence[StageId]) -> list[PlacedStage]:
    """Return the tensor-parallel groups of some stages: each holds all that its stage holds."""
    return [group for r, s in holders for group in placement.replicas[r].stages[s].groups]


def witness_of(placement: Placement) -> list[int]:
    """Find for each replica the first replica with the same layers in groups of the same widths,
    and with the same parts of experts dealt out over replicas: both come to equal exchanges, with
    as many buffers, at the same times."""
    # `least_rooms` and the clock ask one replica of each kind.
    first: dict[tuple[object, ...], int] = {}
    return [
        first.setdefault(
            (
                replica.first_layers,
                tuple([s.width for s in replica.stages]),
                tuple([s.place_in_experts for s in replica.stages]),
            ),
            r,
        )
        for r, replica in enumerate(placement.replicas)
    ]


def buffers_of(
    placement: Placement,
    rooms: Mapping[StageId, int],
    sets: int,
    rank_bytes: float,
    *,
    is_packed: bool,
    is_received: bool,
) -> dict[StageId, float]:
    """Return the part of each holder's room for a bucket of stages under way; more than 1 where the
    holder's ranks exchange buckets in turns. Who takes none is left out.

    A rank of a narrow stage is in several buckets of ranks for each bucket of stages, and packs
    them, since each is a part of its parameters.

    Args:
        rooms: of the holders.
        sets: rank sets into which it is divided (`cost.sync.buckets.num_rank_sets`).
        rank_bytes: of the bucket of one rank set.
        is_packed: on every rank.
        is_received: what others send arrives beside it.
    """
    found = {}
    for (r, s), room in rooms.items():
        # A rank of the narrowest group is in the most buckets.
        narrowest = min(group.width for group in placement.replicas[r].stages[s].groups)
        # Rank sets that a rank of the narrowest group is in: its part of all sets, rounded up.
        num = -(-sets // narrowest)
        copies = num_copies(is_packed=is_packed or num > 1, is_received=is_received)
        part = num * part_of_room(copies * rank_bytes, room)
        if part:
            found[r, s] = part
    return found


@lru_cache(maxsize=256)
def mean_bucket_params(model: ModelSpec, sets: int) -> float:
    """Estimate the parameters of a bucket (`cost.sync.buckets`) in a long run of layers: whole
    tensors, as many as find room."""
    limit = MAX_BUCKET_ELEMENTS * sets
    # Fill as many buckets as make the mean of a long run; an open rest is not counted.
    size = total = num_full = 0
    while num_full < _BUCKETS_FOR_MEAN:
        for tensor in layer_tensors(model):
            if size and size + tensor > limit:
                total, num_full, size = total + size, num_full + 1, 0
            size += tensor
    return total / num_full


_BUCKETS_FOR_MEAN = 16
