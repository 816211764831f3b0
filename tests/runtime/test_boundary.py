"""Boundaries: every element crosses once, whatever the two widths."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.runtime.boundary import Piece, flat_range, pieces

sizes = st.integers(1, 200)
widths = st.integers(1, 9)


@given(sizes, widths)
def test_ranges_tile_the_activation(num_elements: int, width: int) -> None:
    ranges = [flat_range(num_elements, width, i) for i in range(width)]
    assert [x for start, stop in ranges for x in range(start, stop)] == list(range(num_elements))


@given(sizes, widths, widths)
def test_each_element_crosses_once_and_both_sides_agree(
    num_elements: int, senders: int, receivers: int
) -> None:
    receiver_ranks = tuple(range(100, 100 + receivers))
    sender_ranks = tuple(range(senders))
    sent = sorted(
        (piece.start, piece.stop, rank, piece.peer)
        for rank in sender_ranks
        for piece in pieces(num_elements, senders, rank, receiver_ranks)
    )
    received = sorted(
        (piece.start, piece.stop, piece.peer, rank)
        for index, rank in enumerate(receiver_ranks)
        for piece in pieces(num_elements, receivers, index, sender_ranks)
    )
    assert sent == received
    assert [x for start, stop, *_ in sent for x in range(start, stop)] == list(range(num_elements))


def test_a_known_hop() -> None:
    """12 elements from 2 ranks to 3: the middle receiver gets a piece of each sender."""
    assert pieces(12, 2, 0, (7, 8, 9)) == (Piece(7, 0, 4), Piece(8, 4, 6))
    assert pieces(12, 2, 1, (7, 8, 9)) == (Piece(8, 6, 8), Piece(9, 8, 12))
