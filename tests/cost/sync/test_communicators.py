"""Communicators counted from plan and model."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hetero.cost.memory.libraries import CONNECTION_BYTES
from megatron_hetero.cost.sync.communicators import by_rank, job_communicators
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.communication.communicators import model_communicators
from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.plan.plan import Plan
from tests.runtime.on_machines import on_machines
from tests.runtime.workloads import plan, workload


def test_a_pipeline_beside_one_process() -> None:
    """Ranks 0 and 1 are the wide stage, 2 its last stage, 3 the other replica."""
    found = [
        (c.use, c.ranks) for c in job_communicators(plan("tp2:3,tp1:1 @4 | tp1:4 @2"), workload())
    ]
    assert found[:5] == [
        ("world", (0, 1, 2, 3)),
        ("tensor", (0, 1)),
        ("forward", (0, 1, 2)),
        ("backward", (0, 1, 2)),
        ("losses", (2, 3)),
    ]
    gradients = {ranks for use, ranks in found if use == "gradients"}
    # Halves of layers 0 to 2; whole norms there; layer 3; halves of the tied embedding; positions.
    assert gradients == {(0, 3), (1, 3), (0, 1, 3), (2, 3), (0, 2, 3), (1, 2, 3)}


def test_ranks_that_sum_two_by_two_have_a_communicator() -> None:
    """a and b are near to each other, as c and d are: a sums with c, and b with d."""
    near = on_machines("tp1:4 @1 | tp1:4 @1 | tp1:4 @1 | tp1:4 @1", "abcd", ["ab", "cd"])
    asked = workload()

    def gradients(job: Plan, asked: Workload) -> list[tuple[int, ...]]:
        return [c.ranks for c in job_communicators(job, asked) if c.use == "gradients"]

    assert gradients(near, asked) == [(0, 1, 2, 3), (0, 2), (1, 3)]
    # With the distributed optimizer nothing is summed on all holders.
    divided = replace(asked, training=replace(asked.training, use_distributed_optimizer=True))
    assert gradients(near, divided) == [(0, 1, 2, 3)]
    # Two replicas have one already.
    two = on_machines("tp1:4 @2 | tp1:4 @2", "ab", ["a", "b"])
    assert gradients(two, asked) == [(0, 1)]
    assert gradients(replace(near, exchange_groups=()), asked) == [(0, 1, 2, 3)]
    three = on_machines("tp1:4 @1 | tp1:4 @1 | tp1:4 @2", "abc", ["a", "b", "c"])
    assert gradients(three, asked) == [(0, 1, 2)]


def test_what_one_rank_does_alone_needs_no_communicator() -> None:
    assert model_communicators(plan("tp1:4 @4")) == ()
    assert [c.use for c in model_communicators(plan("tp1:4 @2 | tp1:4 @2"))] == []
    # Width 1: the ranks of the context are the whole stage.
    assert [c.use for c in model_communicators(plan("tp1cp2:4 @4"))] == ["context"]


@given(
    st.sampled_from(["tp2:3,tp1:1", "tp1:4", "tp4:2,tp2:2", "tp1:1,tp2cp2:3"]), st.integers(2, 6)
)
def test_alike_replicas_add_ranks_and_no_communicators(kind: str, number: int) -> None:
    """The count of each rank is that of two replicas, whatever their number."""

    def counts(copies: int) -> list[int]:
        job = _copies(f"{kind} @1 | tp2:4 @1", copies)
        return [len(rank.uses) for rank in by_rank(job, workload())]

    few, many = counts(2), counts(number)
    assert sorted(set(few)) == sorted(set(many))


def test_bytes_follow_the_connections() -> None:
    ranks = by_rank(plan("tp2:2,tp2:2 @4"), workload())
    # The world and a group of two with two connections each; two ways of a boundary with one peer;
    # the last stages; halves and whole of the tied embedding.
    assert ranks[0].uses.count("gradients") == 1
    assert ranks[0].bytes_per_channel == ranks[0].num_connections * CONNECTION_BYTES
    assert ranks[0].num_connections == 2 * 3 + 2
    assert pytest.approx(9.19 * 2**20, rel=1e-3) == CONNECTION_BYTES


def _copies(layout: str, number: int) -> Plan:
    made = plan_from_layout(parse_layout(layout))
    return replace(made, replicas=made.replicas * number)
