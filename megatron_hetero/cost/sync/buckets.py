"""Gradients that travel together: the runtime's buckets, as far as time depends on them.

`runtime.gradients.buckets` cuts every parameter at the union of all ranks' shard edges and collects
slices with the same holders, in the order in which a backward pass finishes them, until a bucket is
full.  Ranks of tensor-parallel groups work side by side on their own slices of the same parameters,
so here a bucket has stages as its holders and stands for one bucket of every set of ranks.

What every rank of a group holds whole (norms, biases after row-parallel products, positions) has
all ranks of those stages as its holders, and buckets of its own.  They are small, but with the
distributed optimizer each takes a little of a rank's room (`cost.sync.room`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate
from math import lcm

from megatron_hetero.cost.parameters import (
    attention_matrices,
    embedding_params,
    further_params,
    layer_params,
    shared_expert_matrices,
    whole_layer_params,
)
from megatron_hetero.cost.placement import PlacedStage, Placement
from megatron_hetero.cost.share import even_share
from megatron_hetero.model.spec import ModelSpec

MAX_BUCKET_ELEMENTS = 64 << 20
"""256 MiB of fp32: what a bucket that has to be packed takes beside the gradients themselves."""

EMBEDDING = -1
"""Number of the embedding where layers are numbered: it comes before the first one."""

StageId = tuple[int, int]
"""(replica, stage)."""


@dataclass(frozen=True)
class StageBucket:
    """Parameters (of the whole model, not sharded) with the same holders.

    `layer`: with its backward pass the bucket is complete; `EMBEDDING`, or the number of layers for
    what follows them.  `num_rank_sets`: the buckets of ranks that it stands for; a rank of a narrow
    stage is in several of them.  `is_whole`: every rank of its holders holds all of it.
    `num_in_matrices`: of stock Megatron's, the parameters that are elements of layers' matrices.
    """

    holders: tuple[StageId, ...]
    num_params: int
    layer: int
    num_rank_sets: int = 1
    is_whole: bool = False
    num_in_matrices: int = 0


@dataclass(frozen=True)
class _BucketSlice:
    holders: tuple[StageId, ...]
    num_params: int
    layer: int
    is_whole: bool = False


def stage_buckets(
    placement: Placement,
    model: ModelSpec,
    vocab_rows: int,
    max_elements: int = MAX_BUCKET_ELEMENTS,
    *,
    whole_apart: bool = False,
) -> tuple[StageBucket, ...]:
    """Build all buckets to exchange, in the order of starts on every stage.

    Args:
        placement: the stages that hold the parameters.
        vocab_rows: rows of the padded vocabulary.
        max_elements: of one bucket on one rank, unless a single slice is larger.
        whole_apart: make the buckets of what the ranks of a group hold whole; else it is in the
            others, which take as long but for latency.
    """
    # Buckets still open, by holders; each has the place of its last slice.
    done: list[tuple[int, StageBucket]] = []
    open_: dict[tuple[tuple[StageId, ...], bool], tuple[int, StageBucket]] = {}
    for place, piece in enumerate(_slices(placement, model, vocab_rows)):
        stages = [placement.replicas[r].stages[s] for r, s in piece.holders]
        # A single group has nobody to exchange with.
        if sum(stage.context_parallel for stage in stages) == 1:
            continue
        # Ranks cut a matrix at the edges of all holders; what they hold whole has one set of ranks.
        sets = num_rank_sets(stages)
        is_apart = whole_apart and piece.is_whole and sets > 1
        key = piece.holders, is_apart
        sets = 1 if is_apart else sets
        # Parameters of the open bucket, which grows until the limit of all its rank sets.
        size = open_[key][1].num_params if key in open_ else 0
        # Without buckets of its own it goes with the last matrix of its layer.
        goes_along = piece.is_whole and not is_apart and piece.layer != EMBEDDING
        if size and size + piece.num_params > max_elements * sets and not goes_along:
            done.append(open_.pop(key))
            size = 0
        bucket = StageBucket(piece.holders, size + piece.num_params, piece.layer, sets, is_apart)
        open_[key] = place, bucket
    done += open_.values()
    # By the place of the last slice: a bucket starts when that slice is complete.
    return tuple(bucket for _, bucket in sorted(done, key=lambda entry: entry[0]))


def _slices(placement: Placement, model: ModelSpec, vocab_rows: int) -> Iterator[_BucketSlice]:
    """Yield all tensors with the stages of each, in the order in which a backward pass finishes the
    gradients."""
    replicas = placement.replicas
    first_stages = tuple((r, 0) for r in range(len(replicas)))
    last_stages = tuple((r, len(replica.stages) - 1) for r, replica in enumerate(replicas))
    words = vocab_rows * model.hidden_size
    positions = embedding_params(model, 1, 0)
    # Behind the layers: output layer and further tokens, of last stages.
    if not model.tied_embeddings:
        yield _BucketSlice(last_stages, words, model.num_layers)
    if model.mtp_num_layers:
        further = further_params(model, even_share(model, 1))
        yield _BucketSlice(last_stages, further, model.num_layers)
    # Layers from the last to the first, each with the stage of every replica that holds it.
    # [replica] -> stage that holds the current layer; layers fall, so stages only fall.
    stage_of = [len(replica.stages) - 1 for replica in replicas]
    for layer in reversed(range(model.num_layers)):
        for r, replica in enumerate(replicas):
            if replica.first_layers[stage_of[r]] > layer:
                stage_of[r] -= 1
        stage = replicas[0].stages[stage_of[0]]
        if layer < replicas[0].first_layers[stage_of[0]] + stage.num_sharded_layers:
            continue  # exchanged in the passes themselves
        holders = tuple(enumerate(stage_of))
        # Matrices in the order of backward, without what ranks hold whole, which comes by itself.
        kind = model.of_layer(layer)
        tensors, whole = layer_tensors(kind), whole_layer_params(kind)
        sizes = (*tensors[:-1], tensors[-1] - whole)
        num_of_experts = kind.num_experts * (3 if kind.gated_mlp else 2)
        parts = holders_of_experts(placement, holders) if num_of_experts else ()
        for place, size in enumerate(sizes):
            is_experts = place < num_of_experts
            # Matrices of experts come first: each lies with the holders of its part of the experts.
            own = parts[place * len(parts) // num_of_experts] if is_experts else holders
            yield _BucketSlice(own, size, layer)
        yield _BucketSlice(holders, whole, layer, is_whole=True)
    # Before the layers: embeddings, of first stages and copies on last ones.
    both = tuple(sorted(set(first_stages + last_stages)))
    if positions:
        # The last stage embeds the tokens too where it predicts further ones.
        holders = both if model.mtp_num_layers else first_stages
        yield _BucketSlice(holders, positions, EMBEDDING, is_whole=True)
    yield _BucketSlice(both if model.copies_words else first_stages, words, EMBEDDING)


def holders_of_experts(
    placement: Placement, holders: tuple[StageId, ...]
) -> tuple[tuple[StageId, ...], ...]:
    """Return the stages that hold each of equal parts of a layer's experts, in order.

    Stages that deal experts out over replicas have a part together.
    """
    # Distinct groups that hold all experts between them; a stage without dealing is one alone.
    stages = {(r, s): placement.replicas[r].stages[s] for r, s in holders}
    at = {device: holder for holder, stage in stages.items() for device in stage.devices}
    groups: dict[tuple[StageId, ...], None] = {}
    for holder, stage in stages.items():
        together: tuple[StageId, ...] = (holder,)
        if stage.experts is not None:
            together = tuple(dict.fromkeys(at[device] for device in stage.experts.devices))
        groups[together] = None
    # So many equal parts that no group's cut goes through a part.
    num_parts = lcm(*map(len, groups))
    return tuple(
        tuple(sorted(group[part * len(group) // num_parts] for group in groups))
        for part in range(num_parts)
    )


def layer_tensors(model: ModelSpec) -> tuple[int, ...]:
    """Count the parameters of a layer's matrices in the order of the backward pass, norms and
    biases with the last of them; a gated first matrix is two."""
    share = even_share(model, 1)
    hidden, columns = model.hidden_size, share.mlp_columns
    matrices = [hidden * columns] * (3 if model.gated_mlp else 2) * (model.num_experts or 1)
    matrices += shared_expert_matrices(model, share)
    # The last product's matrix is what is left, with norms and biases.
    matrices += list(attention_matrices(model, share)[:-1])
    return (*matrices, layer_params(model, share) - sum(matrices))


def num_rank_sets(stages: list[PlacedStage]) -> int:
    """Count the pieces of a matrix cut at the shard edges of all stages."""
    edges = set()
    for shares in {stage.shares or (1,) * stage.width for stage in stages}:
        # Exact fractions, since edges of unlike shares must meet where they are equal.
        edges |= {Fraction(end, sum(shares)) for end in accumulate(shares)}
    return len(edges)
