"""Tokens of a sequence on the context-parallel ranks of a stage, and their positions.

Each rank has two chunks, one from the front and one, as far from the end, from the back.  Under a
causal mask the two together meet as many keys as their tokens times the length of the sequence, so
that attention is divided as the tokens are, in equal shares (Megatron's order,
`get_batch_on_this_cp_rank`) and in unlike ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import lcm

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.plan import StageShape
from megatron_hetero.plan.sharding.shards import shard_edges

Chunk = tuple[int, int]
"""Positions `start .. stop - 1` of a sequence."""


@lru_cache(maxsize=4096)
def token_counts(seq_length: int, shares: tuple[int, ...], width: int = 1) -> tuple[int, ...]:
    """Divide a sequence by shares: whole tokens, an even number for each context-parallel rank.

    Where the sequence allows it, the tensor-parallel ranks of a group can divide its tokens evenly,
    as sequence parallelism does.

    Args:
        seq_length: tokens of the sequence.
        shares: relative sizes, one for each context-parallel rank.
        width: ranks of a tensor-parallel group.
    Raises:
        PlanFormatError: the sequence is odd, or too short to give each rank two tokens.

    >>> token_counts(16, (3, 1))
    (12, 4)
    >>> token_counts(48, (2, 1), 3)  # 32 and 16 do not divide by 3
    (30, 18)
    """
    if seq_length % 2 or seq_length < 2 * len(shares):
        raise PlanFormatError(
            f"a sequence of {seq_length} tokens cannot give each of {len(shares)} context-parallel "
            "ranks two chunks of equal length; use an even --seq-length, or fewer ranks"
        )
    # Tokens come in twos for the two chunks, and in multiples of the width if there are enough.
    unit = lcm(2, width)
    if seq_length % unit or seq_length // unit < len(shares):
        unit = 2
    edges = shard_edges(seq_length // unit, len(shares), shares)
    return tuple(unit * (stop - start) for start, stop in pairwise(edges))


def uneven_tokens(shape: StageShape, seq_length: int) -> tuple[int, ...] | None:
    """Return the tokens of each context-parallel rank of a stage; None where all have as many.

    Args:
        shape: the stage's.
        seq_length: tokens of a sequence.
    """
    shares = shape.uneven_context_shares
    return None if shares is None else token_counts(seq_length, shares, shape.tensor_parallel)


def chunk_edges(tokens: Sequence[int]) -> tuple[tuple[Chunk, Chunk], ...]:
    """Return the two chunks of each member: one from the front and one, as far from the end, from
    the back, so that causal attention is divided as the tokens are.

    >>> chunk_edges((4, 2))  # tokens 0, 1, 4, 5 and 2, 3
    (((0, 2), (4, 6)), ((2, 3), (3, 4)))

    Args:
        tokens: of each member.
    """
    # Front chunks first; `owed` is the half token that rounding has left so far.
    fronts, owed = [], 0.0
    for share in tokens:
        # Odd shares are halved up and down in turn.
        half = share / 2 + owed
        front = int(half + 0.5)
        owed = half - front
        fronts.append(min(front, share))
    # Front chunks go from the start on, back chunks from the end backwards.
    first, last, edges = 0, sum(tokens), []
    for share, front in zip(tokens, fronts, strict=True):
        back = share - front
        edges.append(((first, first + front), (last - back, last)))
        first, last = first + front, last - back
    return tuple(edges)
