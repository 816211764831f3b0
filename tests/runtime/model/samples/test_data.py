"""The division of samples."""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.training.datasets.data_samplers import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
)

from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.batches import BatchSchedule, deal, with_micro_batch_sizes
from megatron_hetero.runtime.model.samples.data import NoData, Order, ReplicaSampler, WholeSet
from tests.runtime import workloads


def constant(layout: str) -> BatchSchedule:
    return BatchSchedule.constant(plan(layout))


def plan(layout: str) -> Plan:
    return with_micro_batch_sizes(workloads.plan(layout), 2)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=4),
)
def test_a_global_batch_is_dealt_out_once(replicas: list[tuple[int, int]]) -> None:
    counts, sizes = zip(*replicas, strict=True)
    dealt = deal(counts, sizes)
    samples = sorted(x for batches in dealt for batch in batches for x in batch)
    assert samples == list(range(sum(c * s for c, s in replicas)))
    assert [len(batches) for batches in dealt] == list(counts)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("consumed", [0, 12])
def test_equal_counts_are_megatrons_own_division(num_replicas: int, consumed: int) -> None:
    layout = " | ".join(["tp1:4 @2"] * num_replicas)
    for replica in range(num_replicas):
        ours = ReplicaSampler(constant(layout), replica, Order(60), consumed)
        stock = MegatronPretrainingSampler(60, consumed, 2, replica, num_replicas)
        expected = list(stock)
        taken = list(ours)
        assert taken == expected[: len(taken)]
        assert len(expected) - len(taken) < 2


def test_a_step_is_the_same_set_of_samples_as_one_process_takes() -> None:
    layout = "tp1:4 @3 | tp1:4 @1 | tp1:4 @2"
    samplers = [list(ReplicaSampler(constant(layout), r, Order(100), 24)) for r in range(3)]
    for step in range(6):
        taken = sorted(
            x
            for batches, count in zip(samplers, (3, 1, 2), strict=True)
            for batch in batches[step * count : (step + 1) * count]
            for x in batch
        )
        assert taken == list(range(24 + step * 12, 36 + step * 12))


@pytest.mark.parametrize("consumed", [0, 12, 60, 72])
def test_shuffled_data_are_one_process_s_in_every_epoch(consumed: int) -> None:
    """`--dataloader-type cyclic`: 31 samples in micro-batches of 2, over the ends of epochs."""
    layout = "tp1:4 @3 | tp1:4 @1x4 | tp1:4 @1"
    asked = plan(layout)
    samplers = [
        iter(ReplicaSampler(BatchSchedule.constant(asked), r, Order(31, 2), consumed))
        for r in range(3)
    ]
    stock = MegatronPretrainingRandomSampler(None, 31, consumed, 2, 0, 1, False)
    one = (sample for epoch in range(9) for batch in stock for sample in batch)
    for _ in range(8):
        taken = [
            x for s, n in zip(samplers, (3, 1, 1), strict=True) for b in islice(s, n) for x in b
        ]
        assert sorted(taken) == sorted(islice(one, 12))


def test_a_whole_set_counts_each_sample_once() -> None:
    samples = [{"tokens": torch.ones(4), "loss_mask": torch.full((4,), n + 1.0)} for n in range(7)]
    filled = WholeSet(samples, 4)
    assert (len(filled), filled.num_batches) == (8, 2)
    assert [float(filled[i]["loss_mask"].sum()) for i in range(8)] == [4, 8, 12, 16, 20, 24, 28, 0]
    assert float(samples[0]["loss_mask"].sum()) == 4


def test_a_rank_without_data_says_so() -> None:
    with pytest.raises(RuntimeError, match="neither on a first nor on a last stage"):
        next(iter(NoData()))
