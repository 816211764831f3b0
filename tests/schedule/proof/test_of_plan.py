"""Plans of every kind end under NCCL's rules, and the proof is quick."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from itertools import islice

import pytest

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.plan.communication import under_way
from megatron_hetero.plan.communication.communicators import MESSAGE_USES
from megatron_hetero.plan.communication.under_way import messages_under_way
from megatron_hetero.plan.plan import Plan
from megatron_hetero.schedule.proof import check
from megatron_hetero.schedule.proof.check import check_operations
from megatron_hetero.schedule.proof.of_plan import How, job_operations
from megatron_hetero.schedule.proof.rules import NUM_STREAMS, blocked_ranks
from tests.runtime.on_machines import on_machines
from tests.runtime.plan_generator import cases
from tests.runtime.recorded_operations import proved_workload
from tests.runtime.workloads import plan, workload

MANY = 1 << 20
"""Connections for as many queues as there are streams."""


@pytest.mark.parametrize("seed", [1, 2])
def test_generated_plans_end(seed: int) -> None:
    for case in islice(cases(seed), 30):
        asked = proved_workload(case)
        for how in (How(), How(aligned=False), How(full_buckets=True)):
            check_operations(case.plan, asked, how)


@pytest.mark.parametrize(
    "layout",
    ["tp2:2,tp1:2 @3", "tp1:1,tp1:1,tp1:2 @6", "tp2:3,tp1:1 @4 | tp1:4 @2"],
)
def test_sequences_of_unlike_lengths_end(layout: str) -> None:
    check_operations(plan(layout), workload(), How(variable_lengths=True))


def test_exchange_groups_end() -> None:
    asked = on_machines("tp1:4 @1 | tp1:4 @1 | tp1:4 @1 | tp1:4 @1", "abcd", ["ab", "cd"])
    for divided in (False, True):
        check_operations(
            asked, workload(overlap_grad_reduce=True, use_distributed_optimizer=divided)
        )


def test_sharded_layers_end() -> None:
    for overlap in (False, True):
        asked = workload(
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            use_distributed_optimizer=True,
        )
        check_operations(plan("tp2:4z2 @3 | tp1:4z2 @1"), asked)


def test_any_launch_counts_end_and_none_needs_more_communicators_than_messages() -> None:
    for counts in ((4, 1), (7, 1), (20, 1), (20, 19), (12, 6), (3, 3)):
        made = _launched(plan("tp1:2,tp1:2 @24"), counts)
        check_operations(made, workload(global_batch_size=24))
        assert messages_under_way(made, 0) == (min(-(-counts[0] // 2), 6),)
        assert messages_under_way(made, 0, announced=True) == (counts[0],)


def test_deep_pipelines_that_launch_far_ahead_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a bound their communicators share torch's 32 streams, in a circle."""
    drawn = random.Random(1)
    hung = 0
    for _ in range(8):
        counts = [1]
        while len(counts) < 16:
            counts.append(counts[-1] + drawn.choice((1, 2, 3, 6, 14)))
        deep = _launched(plan(",".join(["tp1:1"] * 16) + " @64"), tuple(reversed(counts)))
        asked = workload(num_layers=16, global_batch_size=64)
        check_operations(deep, asked)
        with monkeypatch.context() as unbounded:
            unbounded.setattr(under_way, "_MOST", 64)
            try:
                check_operations(deep, asked)
            except PlanFormatError:
                hung += 1
    assert hung


def test_one_communicator_fewer_holds_up_a_launch_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one for all messages of a direction a deep launch ahead waits in a circle, which is
    refused with the ranks in it."""
    made = _launched(plan("tp1:2,tp1:2 @24"), (20, 1))
    for where in ("schedule.proof.of_plan", "plan.communication.communicators"):
        monkeypatch.setattr(f"megatron_hetero.{where}.messages_under_way", lambda *a: (1,))
    with pytest.raises(PlanFormatError, match=r"rank 0 .*\n.*rank 1 ") as refused:
        check_operations(made, workload(global_batch_size=24), source="plan.json")
    assert str(refused.value).startswith("plan.json: on GPUs this plan hangs")


def test_ten_stages_are_proved_in_milliseconds() -> None:
    deep = plan(",".join(["tp1:1"] * 10) + " @20")
    asked = workload(num_layers=10, global_batch_size=20)
    assert _seconds(deep, asked) < 0.5


def test_a_thousand_gpus_are_proved_within_a_second() -> None:
    pairs = " | ".join(["tp4:20,tp2:12 @4 | tp1:16,tp1:16 @2"] * 128)
    asked = workload(num_layers=32, global_batch_size=6 * 128, overlap_grad_reduce=True)
    assert _seconds(plan(pairs), asked) < 1.0


def test_two_replicas_of_a_kind_stand_for_all() -> None:
    """What is proved of fewer replicas holds of all: both end, with one queue and with many."""
    many = plan(" | ".join(["tp2:2,tp1:2 @3"] * 5 + ["tp1:4 @1"] * 4))
    asked = workload(global_batch_size=19)
    few = check._of_each_kind(many)
    assert [len(r.stages) for r in few.replicas] == [2, 2, 1, 1]
    for connections in (1, MANY):
        for one in (many, few):
            assert blocked_ranks(job_operations(one, asked), connections) == ()


@pytest.mark.parametrize("seed", range(12))
def test_stages_of_half_the_width_stand_for_all(seed: int) -> None:
    """A narrower plan hangs if the whole does, with communicators enough and with too few."""
    drawn = random.Random(seed)
    replicas = []
    for _ in range(drawn.randint(1, 3)):
        layers = drawn.choice(([4], [2, 2], [1, 1, 2]))
        widths = [drawn.choice((4, 8)) for _ in layers]
        stages = ",".join(f"tp{w}:{n}" for w, n in zip(widths, layers, strict=True))
        replicas.append(f"{stages} @{drawn.randint(len(layers), 9)}")
    whole = plan(" | ".join(replicas))
    if len(whole.replicas) == 1:
        ahead = sorted((drawn.randint(1, 9) for _ in whole.replicas[0].stages), reverse=True)
        whole = _launched(whole, tuple(ahead))
    asked = workload(
        global_batch_size=sum(r.num_micro_batches for r in whole.replicas),
        num_attention_heads=8,
        hidden_size=64,
        overlap_grad_reduce=drawn.random() < 0.5,
        use_distributed_optimizer=drawn.random() < 0.5,
        sequence_parallel=drawn.random() < 0.5,
    )
    narrow = check._of_narrow_stages(whole, asked)
    assert narrow.layout.num_devices * 2 == whole.layout.num_devices
    for most in (1, 6):
        with pytest.MonkeyPatch.context() as few:
            few.setattr(under_way, "_MOST", most)
            for connections in (1, 4, MANY):
                ends = [
                    not blocked_ranks(job_operations(one, asked), connections)
                    for one in (whole, narrow)
                ]
                assert ends[0] == ends[1]


def test_a_plan_that_hangs_does_so_with_half_the_width() -> None:
    made = _launched(plan("tp4:2,tp4:2 @24"), (20, 1))
    asked = workload(global_batch_size=24, num_attention_heads=8, hidden_size=64)
    narrow = check._of_narrow_stages(made, asked)
    assert [s.shape.tensor_parallel for s in narrow.replicas[0].stages] == [2, 2]
    with pytest.MonkeyPatch.context() as few:
        for where in ("schedule.proof.of_plan", "plan.communication.communicators"):
            few.setattr(f"megatron_hetero.{where}.messages_under_way", lambda *a: (1,))
        assert blocked_ranks(job_operations(narrow, asked))
        with pytest.raises(PlanFormatError, match=r"rank [0-7] "):
            check_operations(made, asked)


@pytest.mark.parametrize(
    "layout", ["tp3:2,tp3:2 @2", "tp4(2:1:1:1):4 @2", "tp4cp2:4 @2", "tp4:2,tp1:2 @2"]
)
def test_blocks_that_are_not_equal_stay(layout: str) -> None:
    whole, asked = plan(layout), workload(num_attention_heads=8, hidden_size=64)
    assert check._of_narrow_stages(whole, asked) is whole


def test_messages_have_streams_of_their_own() -> None:
    """No rank of a usual pipeline has more communicators than torch has streams."""
    for depth in (2, 4, 8, 16):
        layout = ",".join(["tp1:1"] * depth) + f" @{2 * depth}"
        asked = workload(num_layers=depth, global_batch_size=2 * depth)
        job = job_operations(plan(layout), asked)
        for rank in range(depth):
            own = [g for g in job.groups if rank in g.ranks and g.use in MESSAGE_USES]
            assert len(own) <= NUM_STREAMS


def _launched(asked: Plan, counts: tuple[int, ...]) -> Plan:
    (replica,) = asked.replicas
    stages = tuple(
        replace(stage, num_launched_forwards=count)
        for stage, count in zip(replica.stages, counts, strict=True)
    )
    return replace(asked, replicas=(replace(replica, stages=stages),))


def _seconds(asked: Plan, of: object) -> float:
    begin_s = time.process_time()
    check_operations(asked, of)  # type: ignore[arg-type]
    return time.process_time() - begin_s
