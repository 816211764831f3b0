"""Ranks that reduce gradients together: those that hold the same slices of parameters.

`runtime.gradients.buckets` finds these sets from the parameters themselves; here they follow from
plan and model.  Replicas that are cut alike add ranks to the sets, and no set.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import chain as joined
from itertools import pairwise

from megatron_hetero.cost.share import even_share_or_none
from megatron_hetero.cost.sync.buckets import EMBEDDING
from megatron_hetero.model.blocks import padded_vocab_size
from megatron_hetero.model.spec import ModelSpec, Workload
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.communication.communicators import stage_ranks
from megatron_hetero.plan.plan import Plan, StageShape
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.plan.sharding.expert_groups import expert_groups
from megatron_hetero.plan.sharding.shards import (
    COLUMN_BLOCK,
    block_edges,
    common_cuts,
    shard_edges,
)

_Holder = tuple[int, int]
"""(replica, stage)."""


def gradient_holders(plan: Plan, workload: Workload) -> tuple[tuple[int, ...], ...]:
    """Return every set of ranks that reduces gradients together, each once."""
    # A dict keeps the order of first use, in which communicators are made.
    parts = _Parts(plan, workload)
    behind, before = _ends(plan, workload, parts)
    found = dict.fromkeys((*before, *behind))
    for holders, layer in _layer_holders(plan, workload.model):
        found |= dict.fromkeys(_sets_of_layer(workload, parts, holders, layer))
    return tuple(found)


def layer_sets(plan: Plan, workload: Workload) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield (layer, ranks that reduce gradients of the layer together), in the order of a backward
    pass.

    What follows the layers has the number of layers, what comes before them `EMBEDDING`.
    """
    parts, model = _Parts(plan, workload), workload.model
    behind, before = _ends(plan, workload, parts)
    for ranks in behind:
        yield model.num_layers, ranks
    # Layers of one kind with the same holders have the same sets.
    known: dict[tuple[ModelSpec, tuple[_Holder, ...]], tuple[tuple[int, ...], ...]] = {}
    for layer in reversed(range(model.num_layers)):
        holders = _holders_of(plan, layer)
        key = model.of_layer(layer), tuple(holders)
        if key not in known:
            known[key] = _sets_of_layer(workload, parts, holders, layer)
        for ranks in known[key]:
            yield layer, ranks
    for ranks in before:
        yield EMBEDDING, ranks


def _ends(
    plan: Plan, workload: Workload, parts: _Parts
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the sets of ranks of what follows the layers, and of what comes before them."""
    model = workload.model
    first = [(r, 0) for r in range(len(plan.replicas))]
    last = [(r, len(replica.stages) - 1) for r, replica in enumerate(plan.replicas)]
    both = sorted({*first, *last})
    # Behind the layers: final norm, output layer, and layers that predict further tokens.  Under
    # sequence parallelism norms have the gradient of each rank's own tokens alone.
    behind = [parts.whole(last, workload.training.sequence_parallel)]
    if not model.tied_embeddings:
        behind.append(parts.cut(last, "vocabulary"))
    if model.mtp_num_layers:
        # Such a layer is of the kind of the last one, behind a product that divides evenly.
        behind.append(parts.cut(last, "evenly"))
        behind.append(iter(_sets_of_layer(workload, parts, last, model.num_layers - 1)))
    # Before the layers: embeddings.  A tied word embedding is on both ends, and all embeddings are
    # where last stages predict further tokens.  Learned positions are whole on every rank, and so
    # is their gradient.
    before = []
    if model.position_embedding == "learned_absolute":
        holders = both if model.mtp_num_layers else first
        before.append(parts.whole(holders, is_partial=False))
    words = both if model.copies_words else first
    before.append(parts.cut(words, "vocabulary"))
    return _distinct(behind), _distinct(before)


def _sets_of_layer(
    workload: Workload, parts: _Parts, holders: Sequence[_Holder], layer: int
) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks of a layer's parameters, each once.

    Args:
        workload: the job.
        parts: of its plan.
        holders: stages that hold the layer, or one of its kind.
        layer: number of the layer.
    """
    kind_of_layer = workload.model.of_layer(layer)
    found = [parts.cut(holders, kind) for kind in _kinds_of(kind_of_layer)]
    if kind_of_layer.num_experts:
        found.append(parts.cut_experts(holders))
    is_partial = workload.training.sequence_parallel or workload.model.qk_layernorm
    found.append(parts.whole(holders, is_partial))
    return _distinct(found)


def _distinct(sets: Iterable[Iterable[tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    return tuple(dict.fromkeys(joined.from_iterable(sets)))


def _holders_of(plan: Plan, layer: int) -> list[_Holder]:
    """Return the stages that hold a layer."""
    return [
        (r, s)
        for r, replica in enumerate(plan.replicas)
        for s, stage in enumerate(replica.stages)
        for chunk in stage_chunks(stage)
        if chunk.first_layer <= layer < chunk.first_layer + chunk.num_layers
    ]


def _kinds_of(model: ModelSpec) -> Iterator[str]:
    """Yield the kinds of units in which a layer divides; latents always divide evenly."""
    yield "groups"
    if not model.num_experts:
        yield "columns"
    if model.moe_shared_expert_intermediate_size:
        yield "shared"
    if model.divided_latents:
        yield "evenly"


def _layer_holders(plan: Plan, model: ModelSpec) -> list[tuple[list[_Holder], int]]:
    """Return the stages that hold a layer, and the layer, for each distinct set of stages and kind
    of layer."""
    # [replica] -> stage of each layer, where a stage may hold several chunks.
    stage_of = [
        {
            layer: s
            for s, stage in enumerate(replica.stages)
            for chunk in stage_chunks(stage)
            for layer in range(chunk.first_layer, chunk.first_layer + chunk.num_layers)
        }
        for replica in plan.replicas
    ]
    # The first layer of each kind and set of stages stands for all.
    distinct: dict[tuple[ModelSpec, tuple[int, ...]], int] = {}
    for layer in sorted(stage_of[0]):
        stages = tuple(of_replica[layer] for of_replica in stage_of)
        distinct.setdefault((model.of_layer(layer), stages), layer)
    return [(list(enumerate(stages)), layer) for (_, stages), layer in distinct.items()]


class _Parts:
    """Ranks of some stages, by the part of a tensor on each rank."""

    def __init__(self, plan: Plan, workload: Workload) -> None:
        self._plan, self._model = plan, workload.model
        self._ranks_of = stage_ranks(plan)
        self._places = rank_table(plan)
        self._expert_groups = expert_groups(plan)
        self._rows = padded_vocab_size(workload.model, plan.layout.tensor_parallel_widths)

    def whole(self, holders: Sequence[_Holder], is_partial: bool) -> Iterator[tuple[int, ...]]:
        """Yield the holders of what every rank of a group has; partial: of its gradient a part."""
        ranks = tuple(sorted(rank for holder in holders for rank in self._ranks_of[holder]))
        yield from self._exchanged(ranks, is_partial)

    def cut(
        self,
        holders: Sequence[_Holder],
        kind: str,
        others: Mapping[int, tuple[Fraction, Fraction]] | None = None,
        *,
        is_partial: bool = False,
    ) -> Iterator[tuple[int, ...]]:
        """Yield the holders of each slice of a divided tensor, cut at the edges of all of them and
        of `others`, ranks with the interval of each.

        Args:
            holders: stages that divide it.
            kind: of the units in which they do.
            others: ranks of other stages.
            is_partial: ranks of one group have parts of the same gradient.
        """
        # Part of the tensor on each rank, as exact fractions.
        intervals = dict(others or {}) | {
            rank: interval
            for r, s in holders
            for rank, interval in self._intervals(r, s, kind).items()
        }
        # Between two neighbouring edges no rank's interval ends, so the holders are the same.
        edges = sorted({edge for interval in intervals.values() for edge in interval})
        for low, high in pairwise(edges):
            ranks = tuple(
                sorted(rank for rank, (a, b) in intervals.items() if a <= low and high <= b)
            )
            yield from self._exchanged(ranks, is_partial)

    def cut_experts(self, holders: Sequence[_Holder]) -> Iterator[tuple[int, ...]]:
        """Yield the holders of each slice of each expert; on some stages one rank has all of it, or
        ranks of several stages have parts."""
        num_experts = self._model.num_experts
        # Three kinds of stages: whole experts by rank, experts in groups over replicas, divided
        # experts.
        shapes = {(r, s): self._plan.replicas[r].stages[s].shape for r, s in holders}
        tables = {
            holder: shard_edges(num_experts, shape.tensor_parallel, dealt)
            for holder, shape in shapes.items()
            if (dealt := shape.expert_shares) is not None
        }
        own = {rank for holder in holders for rank in self._ranks_of[holder]}
        groups = [group for group in self._expert_groups if not own.isdisjoint(group.ranks)]
        divided = [
            holder
            for holder, shape in shapes.items()
            if holder not in tables and shape.expert_groups is None
        ]
        # Between two cuts all experts have the same holders: the first of them stands for the rest.
        edges = [*tables.values(), *(shard_edges(num_experts, g.size, None) for g in groups)]
        for expert in common_cuts(edges)[:-1] if edges else (0,):
            # Ranks with whole experts hold the expert alone; of a group, its part.
            held = {
                rank: (Fraction(0), Fraction(1))
                for holder, table in tables.items()
                for rank in self._ranks_of[holder]
                if table[(place := self._places[rank].tensor_rank)] <= expert < table[place + 1]
            }
            for group in groups:
                ranks = group.divided[expert * group.size // num_experts]
                held |= {
                    rank: (Fraction(part, group.width), Fraction(part + 1, group.width))
                    for part, rank in enumerate(ranks)
                }
            yield from self.cut(divided, "columns", held, is_partial=bool(groups))

    def _exchanged(self, ranks: tuple[int, ...], is_partial: bool) -> Iterator[tuple[int, ...]]:
        """Yield `ranks` unless they agree without an exchange: one rank, or equals of one group."""
        # Ranks of one group that hold the same have the same gradient, unless each has a part of
        # it.
        places = [self._places[rank] for rank in ranks]
        groups = {(place.replica, place.stage, place.context_rank) for place in places}
        if len(ranks) > 1 and (is_partial or len(groups) > 1):
            yield ranks

    def _intervals(self, r: int, s: int, kind: str) -> dict[int, tuple[Fraction, Fraction]]:
        edges = self._edges(self._plan.replicas[r].stages[s].shape, kind)
        return {
            rank: (edges[place.tensor_rank], edges[place.tensor_rank + 1])
            for rank in self._ranks_of[r, s]
            for place in (self._places[rank],)
        }

    def _edges(self, shape: StageShape, kind: str) -> list[Fraction]:
        """Return edges as parts of the whole; `runtime.parallel.tensor_place` has the same rule."""
        model, width, shares = self._model, shape.tensor_parallel, shape.shares
        # How many there are of each kind, and how many go together.
        units = {
            "groups": (model.num_query_groups, 1),
            "columns": (model.mlp_columns, COLUMN_BLOCK),
            "shared": (model.moe_shared_expert_intermediate_size, COLUMN_BLOCK),
            "vocabulary": (self._rows, model.make_vocab_size_divisible_by),
        }
        # Equal shares that divide the model evenly are cut as without shares.
        divides = even_share_or_none(model, width) is not None
        if shares is None or kind == "evenly" or (len(set(shares)) == 1 and divides):
            return [Fraction(i, width) for i in range(width + 1)]
        edges = block_edges(*units[kind], width, shares)
        return [Fraction(edge, edges[-1]) for edge in edges]
