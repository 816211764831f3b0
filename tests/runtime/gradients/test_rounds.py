"""Exchange plans run over gloo: plain sums, one order of addition, errors that reach who waits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.exchange.by_group import plan_by_group
from megatron_hetero.exchange.plan import ExchangePlan, Owned, Purpose
from megatron_hetero.runtime.gradients.rounds import HolderRounds, RoundsEngine, RoundsWork
from tests.runtime.toy_model import in_world

WORLD = "tp1:1 @1 | tp1:1 @1 | tp1:1 @1 | tp1:1 @1"
SIZE = 29
OWNERS = (Owned(0, 3, 0), Owned(3, 20, 1), Owned(20, 29, 3))


def planned(
    purpose: Purpose = "all_reduce", owners: tuple[Owned, ...] | None = None
) -> ExchangePlan:
    made = plan_by_group(("a", "b", "c", "c"), (("a", "b"), ("c",)), SIZE, purpose, owners)
    assert made is not None
    return made


def buffer(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(SIZE, generator=generator).to(dtype)


def test_holders_end_with_what_the_purpose_says(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        total = torch.stack([buffer(r).double() for r in range(4)]).sum(0)
        bound = 4 * torch.finfo(torch.float32).eps * total.abs().max() * 4
        found = {}
        for tag, purpose in enumerate(("all_reduce", "reduce_scatter", "all_gather")):
            flat = buffer(rank)
            rounds = HolderRounds(planned(purpose, OWNERS), rank)  # type: ignore[arg-type]
            rounds.run(flat, dist.group.WORLD, tag)
            found[purpose] = flat
        assert (found["all_reduce"] - total).abs().max() <= bound
        for owned in OWNERS:
            part = slice(owned.start, owned.stop)
            assert torch.equal(found["all_gather"][part], buffer(owned.holder)[part])
            if owned.holder == rank:
                assert torch.equal(found["reduce_scatter"][part], found["all_reduce"][part])
        # The same bits on all holders, though fp32 sums depend on their order.
        all_found = [torch.empty(SIZE) for _ in range(4)]
        dist.all_gather(all_found, found["all_reduce"])
        assert all(torch.equal(one, all_found[0]) for one in all_found)

    in_world(WORLD, check, tmp_path)


def test_buffers_in_half_precision_are_summed(tmp_path: Path) -> None:
    """Whole numbers below 256 are exact in bf16."""

    def check(rank: int) -> None:
        flat = torch.full((SIZE,), float(60 + rank), dtype=torch.bfloat16)
        HolderRounds(planned(), rank).run(flat, dist.group.WORLD, 0)
        assert flat.tolist() == [246.0] * SIZE

    in_world(WORLD, check, tmp_path)


def test_exchanges_that_are_under_way_together_stay_apart(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        engine, rounds = RoundsEngine(), HolderRounds(planned(), rank)
        buffers = [torch.full((SIZE,), float(10**k * (rank + 1))) for k in range(5)]
        works = [engine.start(rounds, flat, dist.group.WORLD) for flat in buffers]
        for k in (4, 2, 0, 1, 3):
            assert works[k].wait() and works[k].is_completed()
            assert buffers[k].tolist() == [10.0**k * 10] * SIZE

    in_world(WORLD, check, tmp_path)


def test_a_plan_that_does_not_sum_is_refused_before_it_runs() -> None:
    made = planned()
    with pytest.raises(PlanFormatError, match=r"exchange plan .* puts less in its place"):
        HolderRounds(replace(made, table=made.table[1:]), 0)


def test_an_error_of_a_round_reaches_who_waits() -> None:
    def fail() -> None:
        raise ConnectionError("the other side is gone")

    work = RoundsWork(fail)
    assert not work.is_completed()
    work.run()
    assert work.is_completed()
    for _ in range(2):
        with pytest.raises(ConnectionError, match="the other side is gone"):
            work.wait()
