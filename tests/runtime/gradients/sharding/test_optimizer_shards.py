"""Division of the optimizer's state among the holders of a bucket."""

from __future__ import annotations

from math import prod

from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.runtime.gradients.buckets import Bucket, ParameterSlice
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import divide
from megatron_hetero.runtime.parallel.shards import ParameterShard

SHARDS = {
    "column": ParameterShard("column", (40, 6), 0, ((0, 40),), True, False),
    "row": ParameterShard("row", (10, 24), 1, ((0, 24),), True, False),
    "norm": ParameterShard("norm", (7,), 0, ((0, 7),), False, False),
}


def bucket(*slices: ParameterSlice) -> Bucket:
    return Bucket((0, 1, 2), slices)


@given(
    st.lists(
        st.sampled_from(
            [
                ParameterSlice("column", 3, 30),
                ParameterSlice("row", 2, 19),
                ParameterSlice("norm", 0, 7),
            ]
        ),
        min_size=1,
        max_size=5,
    ),
    st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_every_row_has_one_owner_and_parts_follow_the_weights(
    slices: list[ParameterSlice], weights: list[int]
) -> None:
    division = divide(bucket(*slices), SHARDS, weights)
    sizes = [prod(piece.shape(SHARDS[piece.name])) for piece in slices]
    assert sum(division.sizes) == sum(sizes)
    owned = [rows for own in division.rows for rows in own]
    # In the order of the flat buffer, without gaps.
    position = dict.fromkeys(range(len(slices)), 0)
    index = 0
    for rows in owned:
        while rows.slice is not slices[index] or position[index] == _num_rows(slices[index]):
            assert position[index] == _num_rows(slices[index])
            index += 1
        assert rows.start == position[index] < rows.stop
        position[index] = rows.stop
    assert position == {i: _num_rows(piece) for i, piece in enumerate(slices)}
    # No cut is farther from its place than a row.
    widest = max(size // _num_rows(piece) for size, piece in zip(sizes, slices, strict=True))
    for holder in range(len(weights)):
        _, end = division.span(holder)
        assert abs(end - sum(sizes) * sum(weights[: holder + 1]) / sum(weights)) <= widest


def _num_rows(piece: ParameterSlice) -> int:
    return piece.shape(SHARDS[piece.name])[0]


def test_equal_holders_of_a_matrix_get_equal_rows() -> None:
    division = divide(bucket(ParameterSlice("column", 0, 30)), SHARDS, [1, 1, 1])
    assert division.sizes == (60, 60, 60)
    assert [(r.start, r.stop) for own in division.rows for r in own] == [
        (0, 10),
        (10, 20),
        (20, 30),
    ]


def test_a_holder_of_more_memory_keeps_more() -> None:
    division = divide(bucket(ParameterSlice("column", 0, 40)), SHARDS, [1, 3, 1])
    assert division.sizes == (48, 144, 48)
