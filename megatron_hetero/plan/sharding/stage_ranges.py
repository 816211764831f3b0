"""The part of an activation that each rank of a stage stands for, and the exchange of two stages.

An activation `[s, b, h]` is taken flat.  With context parallelism over c ranks Megatron cuts the
sequence into 2c chunks and gives rank r the chunks r and 2c - 1 - r, so that all have equal work
under a causal mask (`get_batch_on_this_cp_rank`); with unlike shares the chunks are as long as
`plan.sharding.token_shares` says.  What such a rank has is cut further into equal ranges, one for
each tensor-parallel rank: what sequence parallelism holds there anyway; without it every rank of
the group holds all and stands for its range.

Arithmetic alone; `runtime.parallel.boundary` moves the numbers.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron_hetero.hashed import value
from megatron_hetero.plan.sharding.token_shares import chunk_edges


@value(frozen=True)
class StageRanks:
    """The global ranks of a stage, tensor-parallel rank fastest, and its context parallelism.

    `tokens` are those of each context-parallel rank where they are unlike (`token_shares`).
    """

    ranks: tuple[int, ...]
    context: int = 1
    tokens: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        """Return the number of ranks of a tensor-parallel group."""
        return len(self.ranks) // self.context

    @property
    def leaders(self) -> StageRanks:
        """Return the first rank of each tensor-parallel group, as a stage."""
        return StageRanks(self.ranks[:: self.width], self.context, self.tokens)

    def part(self, context_rank: int) -> float:
        """Return the part of every sequence that a context-parallel rank has."""
        if self.tokens is None:
            return 1 / self.context
        return self.tokens[context_rank] / sum(self.tokens)

    def own_part(self, whole: int, context_rank: int) -> int:
        """Return what a context-parallel rank has of `whole` elements or tokens."""
        if self.tokens is None:
            return whole // self.context
        return whole * self.tokens[context_rank] // sum(self.tokens)

    def whole(self, own: int, context_rank: int) -> int:
        """Return of how many elements or tokens `own` is the part of a context-parallel rank."""
        if self.tokens is None:
            return own * self.context
        return own * sum(self.tokens) // self.tokens[context_rank]

    def chunks(self, num_elements: int, context_rank: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of the whole activation that a context-parallel rank has, in order."""
        if self.context == 1:
            return ((0, num_elements),)
        # Elements are a multiple of tokens: micro-batch and hidden size go with each token.
        counts = self.tokens or (num_elements // self.context,) * self.context
        scale = num_elements // sum(counts)
        edges = chunk_edges(counts)[context_rank]
        return tuple((start * scale, stop * scale) for start, stop in edges)


@dataclass(frozen=True)
class Piece:
    """Elements `start:stop` of the flat activation, exchanged with global rank `peer`.

    `offset` is where they begin among those that this rank stands for, in its own order.
    """

    peer: int
    start: int
    stop: int
    offset: int

    @property
    def own(self) -> slice:
        """Return the piece's place in what this rank stands for."""
        return slice(self.offset, self.offset + self.stop - self.start)


def flat_range(num_elements: int, width: int, index: int) -> tuple[int, int]:
    """Return the range that rank `index` of `width` tensor-parallel ranks stands for.

    Ranges are equal (the last one may be short), so that they can be gathered by one collective.

    >>> flat_range(10, 4, 3)
    (9, 10)
    """
    size = -(-num_elements // width)
    return min(index * size, num_elements), min((index + 1) * size, num_elements)


def ranges_of(num_elements: int, stage: StageRanks, index: int) -> tuple[tuple[int, int], ...]:
    """Return the ranges of the whole activation that rank `index` holds, in the rank's own order.

    Args:
        num_elements: of the whole activation; its sequence divides by twice the context
            parallelism, where there is any, or is that of `stage.tokens`.
    """
    # Ranks of a stage: context-parallel rank slowest, tensor-parallel rank fastest.
    context_rank, tensor_rank = divmod(index, stage.width)
    num_own = stage.own_part(num_elements, context_rank)
    # The rank's range in what its context-parallel group holds, counted from 0.
    own_start, own_stop = flat_range(num_own, stage.width, tensor_rank)
    found = []
    # `local` is where a chunk begins in the group's own order.
    local = 0
    for first, last in stage.chunks(num_elements, context_rank):
        # The overlap of the chunk with the range, moved to its place in the whole activation.
        start, stop = max(own_start, local), min(own_stop, local + last - first)
        if start < stop:
            found.append((start + first - local, stop + first - local))
        local += last - first
    return tuple(found)


def pieces(
    num_elements: int, stage: StageRanks, index: int, peers: StageRanks
) -> tuple[Piece, ...]:
    """Return the pieces that a rank exchanges with each rank of the neighbouring stage, by
    position.

    Args:
        num_elements: of the whole activation, taken flat.
        stage, index: the rank's stage, and its place in it.
        peers: the neighbouring stage.
    """
    # Ranges of every rank on the other side, in elements of the whole activation.
    theirs = [ranges_of(num_elements, peers, i) for i in range(len(peers.ranks))]
    found = []
    # `offset` counts this rank's own elements up to the current range.
    offset = 0
    for own_start, own_stop in ranges_of(num_elements, stage, index):
        for peer, ranges in zip(peers.ranks, theirs, strict=True):
            # Two ranges of the whole: what both sides hold crosses between them, once.
            for start, stop in ranges:
                start, stop = max(start, own_start), min(stop, own_stop)
                if start < stop:
                    found.append(Piece(peer, start, stop, offset + start - own_start))
        offset += own_stop - own_start
    # By position, as messages of a hop are posted in one order on both sides.
    return tuple(sorted(found, key=lambda piece: piece.start))


def crossing_pairs(
    before: StageRanks, after: StageRanks, sizes: Collection[int]
) -> set[tuple[int, int]]:
    """Return the pairs of ranks, (sender, receiver), between which pieces of activations cross.

    Args:
        before, after: neighbouring stages.
        sizes: elements of whole activations; without any, all pairs.
    """
    if not sizes:
        return {(sender, receiver) for sender in before.ranks for receiver in after.ranks}
    return {
        (sender, piece.peer)
        for size in sizes
        for index, sender in enumerate(before.ranks)
        for piece in pieces(size, before, index, after)
    }


def told_pairs(before: StageRanks, after: StageRanks) -> set[tuple[int, int]]:
    """Return the pairs of ranks, (sender, receiver), of which the first tells the second the shapes
    of activations."""
    # Receivers take turns at tellers, so that no rank tells more than its part.
    tellers = before.ranks
    return {(tellers[i % len(tellers)], receiver) for i, receiver in enumerate(after.ranks)}
