"""Bytes in the result of `verify`: sums over ranks of a stage, beside one copy of every tensor."""

from __future__ import annotations

import torch

from megatron_hetero.lab.verify.distance.traffic import boundaries_to_data, sync_to_data
from megatron_hetero.runtime.parallel.traffic import BoundaryTraffic, RankTraffic
from tests.runtime.workloads import plan


def sent(*sizes: int, tensor_bytes: int) -> BoundaryTraffic:
    traffic = BoundaryTraffic()
    for size in sizes:
        traffic.count([torch.empty(size, dtype=torch.uint8)], tensor_bytes)
    return traffic


def test_ranks_of_a_stage_send_a_tensor_together() -> None:
    asked = plan("tp2:2,tp1:2 @2 | tp1:4 @1")
    ranks = [
        {0: sent(60, 60, tensor_bytes=100)},
        {0: sent(40, 40, tensor_bytes=100)},
        {0: sent(100, 150, tensor_bytes=100)},
        {},
    ]
    first, second = boundaries_to_data(asked, ranks)
    assert first == {
        "replica": 0, "boundary": 0, "from_stage": 0, "messages": 2, "bytes": 200,
        "least_bytes": 200, "bytes_over_least": 1.0,
    }  # fmt: skip
    assert second["bytes_over_least"] == 1.25 and second["from_stage"] == 1


def test_the_sync_is_the_worst_of_its_ranks() -> None:
    ranks = [RankTraffic(100, 2, 4, payload, 50, 0) for payload in (200, 300)]
    assert sync_to_data(ranks) == {
        "most_collectives_per_step": 2.0, "bytes": 500, "least_bytes": 400,
        "bytes_over_least": 1.5, "copied_share": 0.2,
    }  # fmt: skip
    assert sync_to_data([]) is None
