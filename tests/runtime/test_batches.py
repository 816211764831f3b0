"""Batches divided among replicas: in proportion, every sample once; refused where one is left."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.errors import HeteroError, UnsupportedError, UsageError
from megatron_hetero.lab.kit.orders import with_zero_bubble
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.batches import (
    BatchSchedule,
    batch_schedule,
    deal,
    global_batch_size,
    micro_batch_sizes,
    with_batch,
    with_micro_batch_sizes,
    with_micro_batches,
)
from tests.runtime.workloads import plan

FIRST = "tp2:3,tp1:1 @4 | tp1:4 @2"


def sized(layout: str) -> Plan:
    return with_micro_batch_sizes(plan(layout), 1)


def test_counts_and_launches_keep_their_proportion() -> None:
    asked = sized("tp1:2,tp1:2 @6 | tp1:4 @3x2")
    stage = replace(asked.replicas[0].stages[0], num_launched_forwards=5)
    first = replace(asked.replicas[0], stages=(stage, *asked.replicas[0].stages[1:]))
    less = with_batch(replace(asked, replicas=(first, asked.replicas[1])), 4)
    assert [r.num_micro_batches for r in less.replicas] == [2, 1]
    assert less.replicas[0].stages[0].num_launched_forwards == 2


@pytest.mark.parametrize(
    ("text", "asked", "error", "says"),
    [
        ("0:2,60:6", sized(FIRST), UnsupportedError, r"replica 0 4 \* 2/6 micro-batches"),
        ("0:3,60:9", sized(FIRST), UsageError, "batch of 9 sequences, the plan has 6"),
        ("10:3,60:6", sized(FIRST), UsageError, "threshold 0"),
        ("three", sized(FIRST), UsageError, "THRESHOLD"),
        ("0:3,60:6", sized("tp1:4 @1x2 | tp1:4 @4"), UnsupportedError, "no whole number"),
        ("0:3,60:6", sized("tp1:4 @2x2 | tp1:4 @2"), UnsupportedError, "no multiple of replica 0"),
        (
            "0:3,60:6",
            with_zero_bubble(sized("tp1:2,tp2:2 @6"), 0, [3, 3]),
            UnsupportedError,
            "orders of computations",
        ),
    ],
)
def test_what_does_not_divide_is_refused(
    text: str, asked: Plan, error: type[HeteroError], says: str
) -> None:
    with pytest.raises(error, match=says):
        batch_schedule(text, 10, asked)


def test_micro_batches_of_validation() -> None:
    """Each replica's are as many times larger as the job's."""
    asked = with_micro_batch_sizes(plan("tp1:2,tp1:2 @4x2 | tp1:4 @8"), 1)
    found = with_micro_batches(asked, 4, 1).replicas
    assert [(r.num_micro_batches, r.micro_batch_size) for r in found] == [(1, 8), (2, 4)]
    with pytest.raises(UnsupportedError, match="--eval-micro-batch-size 3: replica 0"):
        with_micro_batches(asked, 3, 1)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=4))
def test_every_sample_is_dealt_once_and_in_turn(replicas: list[tuple[int, int]]) -> None:
    counts, sizes = zip(*replicas, strict=True)
    dealt = deal(counts, sizes)
    assert [len(own) for own in dealt] == list(counts)
    assert all(len(one) == size for own, size in zip(dealt, sizes, strict=True) for one in own)
    samples = [sample for own in dealt for one in own for sample in one]
    total = sum(count * size for count, size in replicas)
    assert sorted(samples) == list(range(total))
    layout = " | ".join(f"tp1:4 @{count}x{size}" for count, size in replicas)
    assert global_batch_size(sized(layout)) == total
    # The k-th micro-batch of each replica comes before the next one of any.
    for k in range(max(counts) - 1):
        now = [own[k].stop for own in dealt if len(own) > k]
        later = [own[k + 1].start for own in dealt if len(own) > k + 1]
        assert max(now) <= min(later)


@given(st.integers(1, 4), st.lists(st.integers(1, 6), min_size=1, max_size=3))
def test_a_part_of_the_batch_and_back_is_the_plan_again(part: int, counts: list[int]) -> None:
    asked = sized(" | ".join(f"tp1:2,tp1:2 @{part * count}" for count in counts))
    less = with_batch(asked, sum(counts))
    assert [replica.num_micro_batches for replica in less.replicas] == counts
    assert with_batch(less, part * sum(counts)) == asked


def test_a_step_has_the_plan_of_the_samples_before_it() -> None:
    asked = sized(FIRST)
    schedule = batch_schedule("0:3,60:6", 10, asked)
    assert [first for first, _ in schedule.steps] == [0, 6]
    assert schedule.plan_at(0) == schedule.plan_at(5) == with_batch(asked, 3)
    assert schedule.plan_at(6) == schedule.plan_at(10**9) == schedule.of_validation == asked
    assert BatchSchedule.constant(asked).plans == (asked,)
    half = with_batch(asked, 3)
    assert replace(BatchSchedule.constant(asked), validation=half).of_validation == half


def test_sizes_must_be_written_out() -> None:
    mixed = plan("tp1:4 @2x2 | tp1:4 @2")
    assert micro_batch_sizes(with_micro_batch_sizes(mixed, 3)) == (2, 3)
    with pytest.raises(ValueError, match="use with_micro_batch_sizes"):
        micro_batch_sizes(mixed)
