"""Boundaries: every element crosses once, whatever the widths and the context parallelism."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.plan.sharding.stage_ranges import (
    Piece,
    StageRanks,
    flat_range,
    pieces,
    ranges_of,
)
from megatron_hetero.plan.sharding.token_shares import token_counts

sizes = st.integers(1, 200)
widths = st.integers(1, 9)
contexts = st.integers(1, 4)


def stage(first: int, width: int, context: int = 1) -> StageRanks:
    return StageRanks(tuple(range(first, first + width * context)), context)


def uneven(first: int, width: int, *tokens: int) -> StageRanks:
    return StageRanks(tuple(range(first, first + width * len(tokens))), len(tokens), tokens)


@given(sizes, widths)
def test_ranges_tile_the_activation(num_elements: int, width: int) -> None:
    ranges = [flat_range(num_elements, width, i) for i in range(width)]
    assert [x for start, stop in ranges for x in range(start, stop)] == list(range(num_elements))


@given(st.integers(1, 20), widths, contexts)
def test_the_ranks_of_a_stage_stand_for_all_of_it_once(
    chunk: int, width: int, context: int
) -> None:
    num_elements = chunk * 2 * context
    ranks = stage(0, width, context)
    held = [
        x
        for index in range(len(ranks.ranks))
        for start, stop in ranges_of(num_elements, ranks, index)
        for x in range(start, stop)
    ]
    assert sorted(held) == list(range(num_elements))


def test_context_parallel_ranks_hold_the_chunks_that_megatron_gives_them() -> None:
    """Rank 0 has the first and the last of four chunks; each is divided by two tensor ranks."""
    ranks = stage(0, 2, 2)
    assert [ranges_of(16, ranks, i) for i in range(4)] == [
        ((0, 4),),
        ((12, 16),),
        ((4, 8),),
        ((8, 12),),
    ]
    assert ranges_of(16, stage(0, 1, 2), 0) == ((0, 4), (12, 16))


@given(st.integers(1, 12), widths, contexts, widths, contexts)
def test_each_element_crosses_once_and_both_sides_agree(
    chunk: int, width: int, context: int, next_width: int, next_context: int
) -> None:
    num_elements = chunk * 2 * context * next_context
    check_crossing(num_elements, stage(0, width, context), stage(100, next_width, next_context))


@given(
    st.integers(1, 5),
    widths,
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
    widths,
    st.lists(st.integers(1, 9), min_size=2, max_size=3),
)
def test_each_element_crosses_once_between_unlike_shares(
    hidden: int, width: int, shares: list[int], next_width: int, next_shares: list[int]
) -> None:
    seq_length = 2 * (sum(shares) + sum(next_shares))
    senders, receivers = (
        uneven(first, own_width, *token_counts(seq_length, tuple(own_shares), own_width))
        for first, own_width, own_shares in ((0, width, shares), (100, next_width, next_shares))
    )
    check_crossing(seq_length * hidden, senders, receivers)
    check_crossing(seq_length * hidden, stage(50, next_width), senders)


def check_crossing(num_elements: int, senders: StageRanks, receivers: StageRanks) -> None:
    sent = [
        (piece.start, piece.stop, rank, piece.peer)
        for index, rank in enumerate(senders.ranks)
        for piece in pieces(num_elements, senders, index, receivers)
    ]
    received = [
        (piece.start, piece.stop, piece.peer, rank)
        for index, rank in enumerate(receivers.ranks)
        for piece in pieces(num_elements, receivers, index, senders)
    ]
    assert sorted(sent) == sorted(received)
    crossed = [x for start, stop, *_ in sorted(sent) for x in range(start, stop)]
    assert crossed == list(range(num_elements))
    # A transport matches the messages of two ranks in order.
    for pair in {(sender, receiver) for *_, sender, receiver in sent}:
        assert [m for m in sent if m[2:] == pair] == [m for m in received if m[2:] == pair]


@given(sizes, widths, st.integers(0, 8))
def test_pieces_follow_one_another_in_the_own_range(num_elements: int, width: int, i: int) -> None:
    found = pieces(num_elements, stage(0, width), i % width, stage(100, 3))
    assert [p.offset for p in found] == [
        sum(q.stop - q.start for q in found[:k]) for k in range(len(found))
    ]


def test_a_known_hop() -> None:
    """12 elements from 2 ranks to 3: the middle receiver gets a piece of each sender."""
    two, three = stage(0, 2), StageRanks((7, 8, 9))
    assert pieces(12, two, 0, three) == (Piece(7, 0, 4, 0), Piece(8, 4, 6, 4))
    assert pieces(12, two, 1, three) == (Piece(8, 6, 8, 0), Piece(9, 8, 12, 2))


def test_a_known_hop_from_unlike_shares() -> None:
    """Rank 0 has tokens 0 to 2 and 5 to 7, rank 1 tokens 3 and 4; each token is two elements."""
    senders = uneven(0, 1, 6, 2)
    assert [ranges_of(16, senders, i) for i in (0, 1)] == [((0, 6), (10, 16)), ((6, 8), (8, 10))]
    assert pieces(16, senders, 1, stage(8, 2)) == (Piece(8, 6, 8, 0), Piece(9, 8, 10, 2))
    assert (senders.own_part(16, 0), senders.whole(12, 0), senders.part(1)) == (12, 16, 0.25)


def test_a_known_hop_from_context_parallel_ranks() -> None:
    """Chunks 0 and 3 of rank 0 go to both halves; they lie side by side on rank 0."""
    halves = StageRanks((8, 9))
    assert pieces(16, stage(0, 1, 2), 0, halves) == (Piece(8, 0, 4, 0), Piece(9, 12, 16, 4))
    assert pieces(16, halves, 0, stage(0, 1, 2)) == (Piece(0, 0, 4, 0), Piece(1, 4, 8, 4))
