"""Buckets exchanged by groups of machines: the sums of one all-reduce, the same bits everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import P2POp

from megatron_hetero.runtime.gradients.buckets import Bucket
from megatron_hetero.runtime.gradients.groups import rounds
from megatron_hetero.runtime.gradients.groups.grouped import (
    GroupedDividedReduction,
    GroupedExchange,
    GroupedReduction,
    exchange_of,
    owners_of,
)
from megatron_hetero.runtime.gradients.memory import data, main_grad
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import divide
from megatron_hetero.runtime.parallel.traffic import RankTraffic
from tests.runtime.gradients.small_bucket import (
    CHECKS,
    SHARDS,
    SIZE,
    SLICES,
    bucket,
    flat,
    parameters,
    sum_of,
    views,
)
from tests.runtime.on_machines import on_machines
from tests.runtime.toy_model import in_world
from tests.runtime.workloads import plan

WORLD = "tp1:1 @1 | tp1:1 @1 | tp1:1 @1 | tp1:1 @1"
MACHINES, GROUPS = ("a", "b", "c", "c"), (("a", "b"), ("c",))
WEIGHTS = [0.5, 0.25, 1.0, 2.0]


def test_only_buckets_of_several_groups_cross() -> None:
    exchange = GroupedExchange(MACHINES, GROUPS)
    crossing = {(0, 2), (0, 3), (1, 2), (1, 3)}
    for pair in [(i, j) for j in range(4) for i in range(j)]:
        assert exchange.crosses(Bucket(pair, SLICES)) == (pair in crossing)
    assert exchange.crosses(bucket(4))


def test_a_plan_without_groups_of_machines_has_no_such_exchange() -> None:
    assert exchange_of(plan(WORLD)) is None
    made = exchange_of(on_machines(WORLD, MACHINES, GROUPS))
    assert made is not None and made.crosses(bucket(4)) and not made.crosses(bucket(2))


def test_owners_are_the_holders_that_have_rows() -> None:
    division = divide(bucket(4), SHARDS, [1, 10_000, 1, 10_000])
    owned = owners_of(division)
    assert [one.holder for one in owned] == [1, 3]
    assert (owned[0].start, owned[0].stop, owned[1].stop) == (0, owned[1].start, SIZE)


@pytest.mark.parametrize("divided", [False, True])
def test_sums_are_those_of_one_exchange(divided: bool, tmp_path: Path) -> None:
    def check(rank: int) -> None:
        own = parameters(rank)
        exchange = GroupedExchange(MACHINES, GROUPS)
        common = views(own), dist.group.WORLD, [], RankTraffic(0), CHECKS
        if not divided:
            whole = GroupedReduction(*common, bucket(4), exchange)
            whole.launch(WEIGHTS[rank])
            whole.finish()
            assert torch.equal(views(own).pack(main_grad), sum_of(WEIGHTS))
            return
        division = divide(bucket(4), SHARDS, [1, 3, 2, 2])
        reduction = GroupedDividedReduction(*common, division, bucket(4), exchange)
        reduction.launch(WEIGHTS[rank])
        reduction.finish()
        mine = torch.cat([part.reshape(-1) for part in reduction.own_gradients])
        assert torch.equal(mine, sum_of(WEIGHTS)[slice(*division.span(rank))])
        reduction.gather(data)()
        given = torch.empty(SIZE)
        for owner in range(4):
            there = flat({name: data(p) for name, p in parameters(owner).items()})
            given[slice(*division.span(owner))] = there[slice(*division.span(owner))]
        assert torch.equal(views(own).pack(data), given)
        inside = Bucket((0, 1), SLICES)
        with pytest.raises(ValueError, match=r"ranks \(0, 1\) are in one group of machines"):
            exchange.plan(inside, SIZE, "all_reduce")

    in_world(WORLD, check, tmp_path)


FOUR, TWO_AND_TWO = ("a", "b", "c", "d"), (("a", "b"), ("c", "d"))


@pytest.mark.parametrize("machines, groups", [(MACHINES, GROUPS), (FOUR, TWO_AND_TWO)])
@pytest.mark.parametrize("weights", [None, (1, 1, 1, 1), (1, 3, 2, 2), (1, 10_000, 1, 10_000)])
def test_messages_go_between_the_pairs_that_are_connected(
    machines: tuple[str, ...],
    groups: tuple[tuple[str, ...], ...],
    weights: tuple[int, ...] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """NCCL must not connect two ranks in the middle of a step."""

    def check(rank: int) -> None:
        exchange = GroupedExchange(machines, groups)
        common = views(parameters(rank)), dist.group.WORLD, [], RankTraffic(0), CHECKS
        whole = replace(bucket(4), num_elements=SIZE)
        division = None if weights is None else divide(whole, SHARDS, weights)
        used: set[tuple[int, int]] = set()

        def recorded(action: Any, part: torch.Tensor, *, group_peer: int, **named: Any) -> P2POp:
            used.add((rank, group_peer) if action is dist.isend else (group_peer, rank))
            return P2POp(action, part, group_peer=group_peer, **named)

        monkeypatch.setattr(rounds, "P2POp", recorded)
        if division is None:
            summed = GroupedReduction(*common, whole, exchange)
            summed.launch(1.0)
            summed.finish()
        else:
            reduction = GroupedDividedReduction(*common, division, whole, exchange)
            reduction.launch(1.0)
            reduction.finish()
            reduction.gather(data)()
        connected = exchange.pairs(whole, division)
        assert used == {pair for pair in connected if rank in pair}

    in_world(WORLD, check, tmp_path)
