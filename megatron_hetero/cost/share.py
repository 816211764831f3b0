"""A tensor-parallel group's member: the part of the model that the member holds and computes.

Heads (in query groups), MLP columns and vocabulary rows divide by the stage's shares, as the
runtime divides them (`runtime.parallel.tensor_place`), and sequences by its `context_shares`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

from megatron_hetero.hashed import hashed_once
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.model.training import TrainingSpec
from megatron_hetero.plan.sharding.shards import COLUMN_BLOCK, block_edges, shard_edges
from megatron_hetero.plan.sharding.token_shares import token_counts


@hashed_once
@dataclass(frozen=True)
class TensorShare:
    """One member of a group of `width`: its query groups and MLP columns of every layer.

    `mlp_columns` are those of each expert where a layer has experts; `shared_columns` those of its
    shared expert, and `dense_columns` those of the dense layers of a model with layers of unlike
    kinds (`ModelSpec.kinds`).  With `experts` it holds so many whole experts of each layer; with 0,
    its columns of every one.

    `shares` and `index` say which of the unlike members it is, of the vocabulary's rows too.  With
    `context_parallel` c it computes one c-th of every sequence, or what `context_shares`, if they
    are unlike, give to `context_rank`.  Its experts work on the tokens of `expert_ranks` ranks of
    one or more replicas; 0: on those of its tensor-parallel group.
    """

    width: int
    query_groups: int
    mlp_columns: int
    shares: tuple[int, ...] | None = None
    index: int = 0
    context_parallel: int = 1
    shared_columns: int = 0
    dense_columns: int = 0
    experts: int = 0
    context_shares: tuple[int, ...] | None = None
    context_rank: int = 0
    expert_ranks: int = 0

    def of_kind(self, index: int) -> TensorShare:
        """Return the share in a layer of number `index` of `ModelSpec.kinds`."""
        # Kind 0 has experts in all layers, kind 1 is dense (`ModelSpec.kinds`).
        if index == 0:
            return replace(self, dense_columns=0)
        return replace(
            self,
            mlp_columns=self.dense_columns,
            shared_columns=0,
            dense_columns=0,
            experts=0,
            expert_ranks=0,
        )

    def num_experts(self, model: ModelSpec) -> int:
        """Count the experts of a layer of which this member holds anything."""
        return self.experts or model.num_experts

    def routed_tokens(self, model: ModelSpec, training: TrainingSpec) -> float:
        """Count the tokens of a micro-batch for this member's experts under a balanced router, a
        token once for each expert, and the rows that fp8 adds to these: to each expert's, or where
        routers pad to those of each rank for it."""
        # A balanced router gives each expert topk / num_experts of the group's tokens.
        tokens, num_experts = self.num_tokens(model, training), self.num_experts(model)
        routed = tokens * model.moe_router_topk * num_experts / model.num_experts
        # Experts of a group over replicas hear from `expert_ranks` ranks, not from `width` alone.
        num_ranks = self.expert_ranks or self.width
        padded = num_experts * training.padded_rows * (num_ranks if training.pads_routing else 1)
        return routed * num_ranks / self.width + padded

    def num_tokens(self, model: ModelSpec, training: TrainingSpec) -> int:
        """Count the tokens of a micro-batch on the member's group."""
        return training.micro_batch_size * self.sequence_tokens(model)

    def sequence_tokens(self, model: ModelSpec) -> int:
        """Count the tokens of a sequence on the member's group."""
        if self.context_shares is None:
            return model.seq_length // self.context_parallel
        return self.all_sequence_tokens(model)[self.context_rank]

    def all_sequence_tokens(self, model: ModelSpec) -> tuple[int, ...]:
        """Count the tokens of a sequence that each context-parallel rank's group computes."""
        if self.context_shares is None:
            return (model.seq_length // self.context_parallel,) * self.context_parallel
        return token_counts(model.seq_length, self.context_shares, self.width)

    def stores_scores(self, training: TrainingSpec, flash: bool) -> bool:
        """Return whether attention writes scores to memory: without flash attention or another
        fusion."""
        # Local layers may compute scores in parts where context parallelism divides the rows.
        divided = training.fused_scores == "divided" and self.context_parallel > 1
        return not (flash or divided or training.fused_scores == "everywhere")

    def own_tokens(self, model: ModelSpec, training: TrainingSpec) -> int:
        """Count the tokens on this member where sequence parallelism divides the group's tokens."""
        tokens = self.num_tokens(model, training)
        return tokens // (self.width if training.sequence_parallel else 1)

    def rows_as_if_even(self, model: ModelSpec, vocab_rows: int) -> int:
        """Return the padded vocabulary whose even share would be this member's rows."""
        # Equal shares pad the vocabulary so that it divides evenly.
        if self.shares is None:
            return vocab_rows
        edges = block_edges(vocab_rows, model.make_vocab_size_divisible_by, self.width, self.shares)
        return (edges[self.index + 1] - edges[self.index]) * self.width


@lru_cache(maxsize=4096)
def member_shares(
    model: ModelSpec,
    width: int,
    shares: tuple[int, ...] | None = None,
    context_parallel: int = 1,
    expert_shares: tuple[int, ...] | None = None,
    context_shares: tuple[int, ...] | None = None,
    expert_groups: tuple[int, int] | None = None,
) -> tuple[TensorShare, ...]:
    """Return the shares of all members, in rank order: of each context-parallel rank's group in
    turn.

    Args:
        width: of the tensor-parallel group.
        shares: of each member; None is equal ones.
        context_parallel: groups that divide each sequence.
        expert_shares: whole experts of each member; None is a part of every expert.
        context_shares: of the sequence, of each context-parallel rank's group; None is equal ones.
        expert_groups: as of `StageShape`.
    Raises:
        PlanFormatError: the width does not divide the model and no shares say how to cut it.
    """
    # Unequal parts of sequences: members as with equal ones, with their rank noted.
    if context_shares is not None and len(set(context_shares)) > 1:
        members = member_shares(model, width, shares, context_parallel, expert_shares)
        return tuple(
            replace(share, context_shares=context_shares, context_rank=index // width)
            for index, share in enumerate(members)
        )
    # Experts dealt out over replicas: a member has whole or divided experts of its group.
    if expert_groups is not None:
        size, divisor = expert_groups
        columns = model.moe_ffn_hidden_size
        # Experts do not follow the shares: columns that any shares divide stand in for theirs, and
        # are replaced below.
        others = replace(model, moe_ffn_hidden_size=width * columns)
        return tuple(
            replace(
                share,
                mlp_columns=columns // divisor,
                experts=model.num_experts // size if size > 1 else 0,
                expert_ranks=size * divisor,
            )
            for share in member_shares(others, width, shares, context_parallel)
        )
    if expert_shares is not None:
        # What is divided is all but the experts, which are whole where they are.
        others = replace(model, moe_ffn_hidden_size=width * model.moe_ffn_hidden_size)
        edges = shard_edges(model.num_experts, width, expert_shares)
        counts = [stop - start for start, stop in pairwise(edges)]
        return tuple(
            replace(share, mlp_columns=model.moe_ffn_hidden_size, experts=count)
            for share, count in zip(
                member_shares(others, width, shares, context_parallel),
                counts * context_parallel,
                strict=True,
            )
        )
    # Everything that a tensor-parallel group divides, and how many go together: heads, columns
    # of all kinds.
    units = (
        (model.num_query_groups, 1),
        (model.mlp_columns, COLUMN_BLOCK),
        (model.moe_shared_expert_intermediate_size, COLUMN_BLOCK),
        (model.dense_columns, COLUMN_BLOCK),
    )
    # Equal shares that divide everything are no shares.
    if shares is not None and len(set(shares)) == 1 and not any(n % width for n, _ in units):
        shares = None
    # Cut each by the shares; members in rank order, for each context-parallel rank.
    own = [
        # Shape [unit][member]: a unit that the model lacks is 0 for each member.
        [stop - start for start, stop in pairwise(block_edges(number, block, width, shares))]
        if number
        else [0] * width
        for number, block in units
    ]
    return (
        tuple(
            TensorShare(
                width,
                own_groups,
                columns,
                shares,
                index if shares is not None else 0,
                context_parallel,
                shared,
                of_dense,
            )
            for index, (own_groups, columns, shared, of_dense) in enumerate(zip(*own, strict=True))
        )
        * context_parallel
    )


def equal_dealing(model: ModelSpec, width: int) -> tuple[int, ...] | None:
    """Return the table by which a group of `width` deals whole experts out, as many to each; None
    where they, or what stays divided, do not come out even, or there is nobody to deal to."""
    # All that has to come out even: the experts dealt out, and what the group still divides.
    units = (
        model.num_experts,
        model.num_query_groups,
        model.moe_shared_expert_intermediate_size,
        model.dense_columns,
    )
    if width == 1 or not model.num_experts or any(number % width for number in units):
        return None
    return (1,) * width


def even_share(model: ModelSpec, width: int) -> TensorShare:
    """Return every member's share of a group that divides the model evenly."""
    return member_shares(model, width)[0]


def even_share_or_none(model: ModelSpec, width: int) -> TensorShare | None:
    """Return `even_share`, or None where the width does not divide the model."""
    if any(number % width for number in (model.num_query_groups, *model.column_kinds)):
        return None
    return even_share(model, width)


def least_shares(model: ModelSpec, width: int) -> tuple[TensorShare, ...]:
    """Return the distinct members of a group of `width` in shares as equal as can be, the largest
    first, as if the vocabulary divided evenly: the slowest takes no more than in any such group."""
    # Where the width divides the model all members are equal.
    even = even_share_or_none(model, width)
    if even is not None:
        return (even,)
    # The vocabulary is left out: without shares the members' rows are equal.
    members = member_shares(model, width, (1,) * width)
    return tuple(dict.fromkeys(replace(member, shares=None, index=0) for member in members))


def _dealt(model: ModelSpec, share: TensorShare) -> int:
    return model.num_experts if share.experts else 1


def largest_fraction(model: ModelSpec, shares: Sequence[TensorShare]) -> float:
    """Return the largest part of a layer's divided parameters on any member."""
    # Held over all, by tensor: heads, MLP or experts, shared expert, dense layers.
    return max(
        held / number
        for share in shares
        for held, number in (
            (share.query_groups, model.num_query_groups),
            (share.mlp_columns * max(share.experts, 1), model.mlp_columns * _dealt(model, share)),
            (share.shared_columns, model.moe_shared_expert_intermediate_size),
            (share.dense_columns, model.ffn_hidden_size),
        )
        if held
    )
