"""Flags that would speed a plan up: priced by planning's own model, true when they are given."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.faster_flags import (
    DIVIDE,
    GATHER,
    OVERLAP,
    FlagGain,
    faster_flags,
)
from megatron_hetero.report.text.faster_flags import faster_flag_lines
from megatron_hetero.schedule.estimate import estimate_plan
from tests.preflight.jobs import with_width

NODES = (("a", "A100-40GB", 2), ("r", "RTX-4090", 2))
JOB = with_width(NODES, "tp1:5,tp1:3 @8 | tp1:5,tp1:3 @8")
FIELDS = {
    DIVIDE: "use_distributed_optimizer",
    OVERLAP: "overlap_grad_reduce",
    GATHER: "overlap_param_gather",
}


def with_flags(plan: Plan, *flags: str) -> Plan:
    """The plan of a job that has these flags."""
    assert plan.workload is not None
    given: dict[str, Any] = {FIELDS[flag]: True for flag in flags}
    training = replace(plan.workload.training, **given)
    return replace(plan, workload=replace(plan.workload, training=training))


def test_each_gain_is_the_price_of_the_same_plan_under_the_flags() -> None:
    plan, cluster = JOB
    gains = faster_flags(plan, cluster)
    assert gains
    for gain in gains:
        priced = estimate_plan(with_flags(plan, *gain.flags), cluster)
        assert gain.step_time_s == priced.step_time_s < gain.from_s
        assert gain.from_s == estimate_plan(plan, cluster).step_time_s
        assert all(d.peak_bytes <= d.capacity_bytes for d in priced.devices.values())


def test_flags_that_the_job_has_are_not_named() -> None:
    plan, cluster = JOB
    assert faster_flags(with_flags(plan, *FIELDS), cluster) == ()
    for gain in faster_flags(with_flags(plan, OVERLAP), cluster):
        assert OVERLAP not in gain.flags


def test_a_set_of_flags_is_named_where_it_gains_more_than_its_parts() -> None:
    gains = {frozenset(gain.flags): gain.step_time_s for gain in faster_flags(*JOB)}
    for flags, step_s in gains.items():
        assert all(step_s < other for part, other in gains.items() if part < flags)


def test_one_replica_exchanges_nothing() -> None:
    assert faster_flags(*with_width(NODES, "tp1:2,tp1:2,tp1:2,tp1:2 @16")) == ()


def test_a_larger_micro_batch_is_named_where_it_changes_the_objective() -> None:
    plan, cluster = JOB
    assert plan.workload is not None
    assert not [gain for gain in faster_flags(plan, cluster) if gain.changes_objective]
    masked = replace(
        plan.workload,
        megatron_args=(*plan.workload.megatron_args, "--eod-mask-loss"),
        training=replace(plan.workload.training, per_token_loss=False),
    )
    plan = replace(plan, workload=masked)
    (gain,) = [gain for gain in faster_flags(plan, cluster) if gain.changes_objective]
    (flag,) = gain.flags
    size = int(flag.split()[1])
    assert size in (2, 4, 8)
    own = masked.training.micro_batch_size
    larger = replace(
        plan,
        workload=replace(masked, training=replace(masked.training, micro_batch_size=size * own)),
        replicas=tuple(replace(r, num_micro_batches=8 // size) for r in plan.replicas),
    )
    assert estimate_plan(larger, cluster).step_time_s == gain.step_time_s < gain.from_s
    (line,) = faster_flag_lines([gain])
    assert "change what is trained" in str(line)


def test_the_lines() -> None:
    gain = FlagGain((DIVIDE, OVERLAP), 5.70, 5.43)
    (line,) = faster_flag_lines([gain])
    assert str(line) == (
        "--use-distributed-optimizer --overlap-grad-reduce would take this plan from 5.7 s to "
        "5.43 s a step (4.7% less)"
    )
