"""One bucket reduced over gloo: the plain sum, on every holder or on the owners of its rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.runtime.gradients.memory import BucketViews, data, main_grad
from megatron_hetero.runtime.gradients.reduction import (
    DividedReduction,
    Reduction,
    check_gradients,
    scatter,
)
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import divide
from megatron_hetero.runtime.parallel.traffic import RankTraffic
from tests.runtime.gradients.small_bucket import (
    CHECKS,
    SHARDS,
    SIZE,
    SLICES,
    bucket,
    flat,
    gradients,
    parameters,
    sum_of,
    views,
)
from tests.runtime.toy_model import in_world

WORLD = "tp1:1 @1 | tp1:1 @1 | tp1:1 @1"
WEIGHTS = [0.5, 0.25, 1.0]


def test_a_bucket_is_the_weighted_sum_without_what_is_counted_elsewhere(tmp_path: Path) -> None:
    """The norm is left out by rank 1, which has a copy; nothing outside of the slices moves."""
    norm = SIZE - 7, SIZE

    def check(rank: int) -> None:
        own, traffic = parameters(rank), RankTraffic(SIZE * 4)
        copies = [norm] if rank == 1 else []
        reduction = Reduction(views(own), dist.group.WORLD, copies, traffic, CHECKS)
        assert not reduction.is_in_place and reduction.num_copies == 1
        reduction.launch(WEIGHTS[rank])
        assert reduction.is_under_way
        reduction.finish()
        assert not reduction.is_under_way
        expected = sum_of(WEIGHTS)
        expected[slice(*norm)] = sum_of([0.5, 0.0, 1.0])[slice(*norm)]
        assert torch.equal(views(own).pack(main_grad), expected)
        outside = gradients(rank, "rows")[:1], gradients(rank, "columns")[:, 6:]
        assert torch.equal(main_grad(own["rows"])[:1], outside[0])
        assert torch.equal(main_grad(own["columns"])[:, 6:], outside[1])
        assert traffic.payload_bytes == traffic.packed_bytes == 4 * SIZE

    in_world(WORLD, check, tmp_path)


def test_adjacent_slices_are_reduced_where_they_lie(tmp_path: Path) -> None:
    """As in Megatron's own buffer; with weight 1 the buffer is not touched before the sum."""

    def check(rank: int) -> None:
        own, traffic = parameters(rank), RankTraffic(0)
        buffer = torch.cat([gradients(rank, name).reshape(-1) for name in ("rows", "norm")])
        own["rows"].main_grad = buffer[:24].view(6, 4)  # type: ignore[attr-defined]
        own["norm"].main_grad = buffer[24:]  # type: ignore[attr-defined]
        last_rows = type(SLICES[0])("rows", 2, 6)
        both = BucketViews((last_rows, SLICES[2]), SHARDS, own)
        reduction = Reduction(both, dist.group.WORLD, [], traffic, CHECKS)
        assert reduction.is_in_place and not reduction.num_copies
        reduction.launch(1.0)
        reduction.finish()
        for name in ("rows", "norm"):
            whole = torch.stack([gradients(r, name) for r in range(3)]).sum(0)
            start = 2 if name == "rows" else 0
            assert torch.equal(main_grad(own[name])[start:], whole[start:])
        assert torch.equal(buffer[:8].view(2, 4), gradients(rank, "rows")[:2])
        assert (traffic.payload_bytes, traffic.packed_bytes) == (4 * 23, 0)

    in_world(WORLD, check, tmp_path)


def test_owners_get_the_sum_of_their_rows_and_give_them_to_all(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        own = parameters(rank)
        division = divide(bucket(3), SHARDS, [1, 3, 2])
        reduction = DividedReduction(
            views(own), dist.group.WORLD, [], RankTraffic(0), CHECKS, division
        )
        for step in range(2):  # the second finds nothing of the first
            for name in SHARDS:
                main_grad(own[name]).copy_(gradients(rank, name, step))
            reduction.launch(WEIGHTS[rank])
            reduction.finish()
            start, stop = division.span(rank)
            mine = torch.cat([part.reshape(-1) for part in reduction.own_gradients])
            assert torch.equal(mine, sum_of(WEIGHTS, step)[start:stop])
            reduction.gather(main_grad)()
            assert torch.equal(views(own).pack(main_grad), sum_of(WEIGHTS, step))
        reduction.gather(data)()
        given = torch.empty(SIZE)
        for owner in range(3):
            there = parameters(owner)
            span = slice(*division.span(owner))
            given[span] = flat({name: data(p) for name, p in there.items()})[span]
        assert torch.equal(views(own).pack(data), given)

    in_world(WORLD, check, tmp_path)


def test_scatter_writes_one_after_the_other() -> None:
    targets = [torch.zeros(2, 3), torch.zeros(4, 4)[:, 1:2], torch.zeros(1)]
    scatter(torch.arange(11.0), targets)
    assert torch.equal(torch.cat([t.reshape(-1) for t in targets]), torch.arange(11.0))


def test_gradients_are_checked_before_the_sum(tmp_path: Path) -> None:
    """The rank at fault raises before it sends anything; what is not asked for is not checked."""

    def check(rank: int) -> None:
        for wrong in (float("nan"), float("inf")):
            own = parameters(rank)
            main_grad(own["norm"])[3] = wrong
            reduction = Reduction(views(own), dist.group.WORLD, [], RankTraffic(0), CHECKS)
            with pytest.raises(RuntimeError, match=r"(?i)nan|inf"):
                reduction.launch(1.0)
            assert not reduction.is_under_way
            unchecked = SimpleNamespace(check_for_nan_in_grad=False, check_for_large_grads=False)
            check_gradients(views(own).pack(main_grad), unchecked)

    in_world("tp1:1 @1", check, tmp_path)
