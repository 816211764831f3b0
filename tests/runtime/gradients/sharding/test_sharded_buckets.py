"""Slices of a sharded layer over gloo: owners give weights to all, and get all gradients."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from megatron_hetero.runtime.gradients.memory import BucketViews, data, main_grad
from megatron_hetero.runtime.gradients.sharding.optimizer_shards import divide
from megatron_hetero.runtime.gradients.sharding.sharded_buckets import ShardedBucket
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

WORLD = "tp1:1 @2 | tp1:1 @1 | tp1:1 @2"
DIVISION = divide(bucket(3), SHARDS, [1, 3, 2])


def test_whole_weights_come_from_the_owners_of_their_rows(tmp_path: Path) -> None:
    def check(rank: int) -> None:
        own, traffic = parameters(rank), RankTraffic(0)
        made = ShardedBucket(views(own), dist.group.WORLD, [], DIVISION, traffic, CHECKS)
        made.arrange()
        pieces = list(made.pieces())
        assert sum(weights.numel() for _, _, weights, _ in pieces) == DIVISION.sizes[rank]
        for rows, parameter, weights, _ in pieces:
            assert torch.equal(weights, rows.view(SHARDS, data(parameter)))
            weights.add_(0.5)  # a step of the optimizer
        for parameter in own.values():
            parameter.data.fill_(-1.0)  # given back between the passes
        made.gather_weights()()
        expected = torch.empty(SIZE)
        for owner in range(3):
            there = flat({name: data(p) for name, p in parameters(owner).items()}) + 0.5
            expected[slice(*DIVISION.span(owner))] = there[slice(*DIVISION.span(owner))]
        assert torch.equal(views(own).pack(data), expected)
        assert own["columns"].data[0, 0] == own["rows"].data[0, 0] == -1.0  # no slice of it
        assert traffic.sharded_bytes == 4 * SIZE

    in_world(WORLD, check, tmp_path)


def test_gradients_of_all_micro_batches_add_up_at_their_owners(tmp_path: Path) -> None:
    """Rank 1 has one micro-batch less and sends zeros; of the norm it has a copy that does not
    count.  In bf16 each sum is rounded once, in fp32 buffers never."""
    norm = SIZE - 7, SIZE
    weights = [0.5, 2.0, 1.0]

    def check(rank: int) -> None:
        own = parameters(rank)
        copies = [norm] if rank == 1 else []
        made = ShardedBucket(views(own), dist.group.WORLD, copies, DIVISION, RankTraffic(0), CHECKS)
        made.arrange()
        for step in range(2):
            for name in SHARDS:
                main_grad(own[name]).copy_(gradients(rank, name, step))
            has_none = rank == 1 and step == 1
            sent = made.send(weights[rank], None if has_none else torch.empty(0))
            made.add(sent)
        both = sum_of(weights) + sum_of([0.5, 0.0, 1.0], step=1)
        both[slice(*norm)] -= (sum_of([0.0, 2.0, 0.0]))[slice(*norm)]
        assert torch.equal(made.gradients, both[slice(*DIVISION.span(rank))])
        made.gather_gradients()
        assert torch.equal(views(own).pack(main_grad), both)

    in_world(WORLD, check, tmp_path)


def test_a_bucket_that_lies_in_one_piece_is_filled_and_sent_where_it_lies(tmp_path: Path) -> None:
    """As a layer's memory has it: neither weights nor gradients are copied into a buffer."""
    slices = type(SLICES[0])("rows", 2, 6), SLICES[2]
    kept_in_weights = SimpleNamespace(**{**vars(CHECKS), "grad_reduce_in_fp32": False})

    def check(rank: int) -> None:
        own = parameters(rank)
        memory = torch.cat([data(own[name]).reshape(-1) for name in ("rows", "norm")]).bfloat16()
        own["rows"] = torch.nn.Parameter(memory[:24].view(6, 4))
        own["norm"] = torch.nn.Parameter(memory[24:])
        both = BucketViews(slices, SHARDS, own)
        division = divide(type(bucket(3))((0, 1, 2), slices), SHARDS, [1, 1, 1])
        made = ShardedBucket(both, dist.group.WORLD, [], division, RankTraffic(0), kept_in_weights)
        made.arrange()
        assert made.gradients.dtype == torch.bfloat16
        made.gather_weights()()
        everywhere = [torch.empty_like(memory) for _ in range(3)]
        dist.all_gather(everywhere, memory)
        assert all(torch.equal(one[8:], memory[8:]) for one in everywhere)  # but not its first rows
        own_gradients = torch.arange(31.0).bfloat16() + rank
        made.add(made.send(1.0, own_gradients.clone()))
        total = 3 * torch.arange(8.0, 31.0) + 3
        assert torch.equal(made.gradients.float(), total[slice(*division.span(rank))])

    in_world(WORLD, check, tmp_path)
