"""The layout of gradient sync: slices, holders, buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.sharding.shards import shard_edges
from megatron_hetero.runtime.gradients.buckets import Bucket, ParameterSlice, plan_buckets
from megatron_hetero.runtime.parallel.shards import ParameterShard


def shard(
    name: str, size: int, width: int, index: int, blocks: int = 1, partial: bool = False
) -> ParameterShard:
    block = size // blocks
    edges = shard_edges(block, width)
    intervals = tuple(
        (b * block + edges[index], b * block + edges[index + 1]) for b in range(blocks)
    )
    return ParameterShard(name, (size, 8), 0, intervals, width > 1, partial)


def copy(name: str, size: int, partial: bool = False) -> ParameterShard:
    return ParameterShard(name, (size,), 0, ((0, size),), False, partial)


def test_widths_two_and_three() -> None:
    """A column of 12 at width 2 (ranks 0, 1) and 3 (ranks 2-4): cut at 4, 6 and 8."""
    tables = [{"w": shard("w", 12, 2, i)} for i in range(2)]
    tables += [{"w": shard("w", 12, 3, i)} for i in range(3)]
    stages = [(0, 0)] * 2 + [(1, 0)] * 3
    assert plan_buckets(tables, stages) == (
        Bucket((0, 2), (ParameterSlice("w", 0, 4),)),
        Bucket((0, 3), (ParameterSlice("w", 4, 6),)),
        Bucket((1, 3), (ParameterSlice("w", 6, 8),)),
        Bucket((1, 4), (ParameterSlice("w", 8, 12),)),
    )


def test_a_gated_projection_is_cut_in_each_half() -> None:
    tables = [{"w": shard("w", 8, 2, i, blocks=2)} for i in range(2)] + [{"w": copy("w", 8)}]
    tables[2] = {"w": ParameterShard("w", (8, 8), 0, ((0, 8),), False, False)}
    assert plan_buckets(tables, [(0, 0), (0, 0), (1, 0)]) == (
        Bucket((0, 2), (ParameterSlice("w", 0, 2), ParameterSlice("w", 4, 6))),
        Bucket((1, 2), (ParameterSlice("w", 2, 4), ParameterSlice("w", 6, 8))),
    )


def test_copies_in_one_tensor_group_need_nothing_but_partial_sums_do() -> None:
    stages = [(0, 0), (0, 0)]
    assert plan_buckets([{"norm": copy("norm", 4)}] * 2, stages) == ()
    assert plan_buckets([{"norm": copy("norm", 4, partial=True)}] * 2, stages) == (
        Bucket((0, 1), (ParameterSlice("norm", 0, 4),)),
    )


def test_a_tied_embedding_has_holders_on_two_stages() -> None:
    tables = [{"e": shard("e", 8, 2, 0)}, {"e": shard("e", 8, 2, 1)}, {"e": shard("e", 8, 1, 0)}]
    assert [b.holders for b in plan_buckets(tables, [(0, 0), (0, 0), (0, 1)])] == [(0, 2), (1, 2)]


def test_large_buckets_are_cut_between_slices() -> None:
    """Slices of 8 x 8 elements: two fit into 128, and one larger than the limit stays whole."""
    tables = [{name: copy(name, 8) for name in "abc"} for _ in range(2)]
    tables = [{n: ParameterShard(n, (8, 8), 0, ((0, 8),), False, False) for n in t} for t in tables]
    parts = [
        "".join(s.name for s in bucket.slices)
        for bucket in plan_buckets(tables, [(0, 0), (1, 0)], max_elements=128)
    ]
    assert parts == ["cb", "a"]
    assert len(plan_buckets(tables, [(0, 0), (1, 0)], max_elements=1)) == 3
    assert len(plan_buckets(tables, [(0, 0), (1, 0)])) == 1


def test_ranks_that_disagree_about_a_shape_are_refused() -> None:
    tables = [{"w": copy("w", 8)}, {"w": copy("w", 9)}]
    with pytest.raises(PlanFormatError, match=r"w: rank 0 .*\(8,\).* rank 1 of \(9,\)"):
        plan_buckets(tables, [(0, 0), (1, 0)])


@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4),
    st.sampled_from([1, 2]),
)
def test_every_element_is_reduced_once_over_all_replicas(widths: list[int], blocks: int) -> None:
    size = 24
    tables, stages = [], []
    for replica, width in enumerate(widths):
        tables += [{"w": shard("w", size, width, i, blocks)} for i in range(width)]
        stages += [(replica, 0)] * width
    buckets = plan_buckets(tables, stages)
    covered = sorted(x for b in buckets for s in b.slices for x in range(s.start, s.stop))
    assert covered == (list(range(size)) if len(widths) > 1 else [])
    for bucket in buckets:
        assert [stages[rank][0] for rank in bucket.holders] == list(range(len(widths)))
        for piece in bucket.slices:
            for rank in bucket.holders:
                assert tables[rank]["w"].holds(piece.start, piece.stop)
                tables[rank]["w"].local_offset(piece.start)
