"""Gradients exchanged by groups of machines: the same training as one process, the same bits on
all holders and in every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.lab.verify.options import OPTIMIZERS, Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.on_machines import on_machines
from tests.runtime.runs import train, whole_weights
from tests.runtime.workloads import LLAMA_LIKE, workload

Case = tuple[str, str, str, dict[str, Any], tuple[str, ...]]
"""Layout, machines of its replicas, groups of machines (as `a:4 b:1|c:2` with uplinks), changes of
the model, flags."""
ZERO = "--use-distributed-optimizer"
OVERLAP = ("--overlap-grad-reduce", "--no-align-grad-reduce")
CASES: dict[str, Case] = {
    "2 and 1 holders of unlike depth": (
        "tp1:2,tp1:2 @2 | tp1:4 @1 | tp1:4 @2", "a b c", "a b|c", {}, OVERLAP),
    "pairs between two and two": (
        "tp1:2,tp1:2 @2 | tp1:4 @1 | tp1:4 @1 | tp1:4 @2", "a b c d", "a b|c d", {}, OVERLAP),
    "divided, unlike depth": (
        "tp1:2,tp1:2 @2 | tp1:4 @1 | tp1:4 @2", "a b c", "a b|c", LLAMA_LIKE,
        (ZERO, *OVERLAP, "--overlap-param-gather")),
    "unlike uplinks, each machine a group": (
        "tp1:2,tp1:2 @2 | tp1:4 @1 | tp1:4 @2 | tp1:4 @1", "a b c d", "a:4|b:3|c:1|d:1", {},
        OVERLAP),
    "unlike uplinks, divided, unlike widths": (
        "tp2:4 @2 | tp1:4 @1 | tp1:4 @1 | tp1:4 @1", "a b c d", "a:1 b:3|c:2|d:5", LLAMA_LIKE,
        (ZERO, *OVERLAP)),
}  # fmt: skip
MORE: dict[str, Case] = {
    "unlike widths, two on a machine": (
        "tp2:4 @2 | tp1:4 @1 | tp1:4 @1", "a a b", "a|b", {}, ()),
} | {
    f"{layout} on {machines} {' '.join(flags)}": (
        layout, machines, groups, changes, flags
    )
    for layout, machines, groups in (
        ("tp2:4 @1 | tp2:4 @1", "a b", "a|b"),
        ("tp1:4 @1 | tp2:4 @2 | tp1:4 @1", "a b c", "a c|b"),
        ("tp3(2:1:1):4 @2 | tp2:4 @2 | tp1:4 @1", "a b c", "a b|c"),
        ("tp1:3,tp1:1 @2 | tp1:1,tp1:3 @2 | tp1:4 @1 | tp1:4 @1", "a b c c", "a b|c"),
        ("tp1:4 @1 | tp1:4 @1 | tp1:4 @1 | tp1:4 @1 | tp1:4 @1 | tp1:4 @2", "a a b c d d",
         "a b|c|d"),
        ("tp1:4 @1 | tp1:4 @1 | tp1:4 @1 | tp1:2,tp1:2 @2 | tp2:4 @2", "a b c d e",
         "a:5|b:3 c:1|d:2 e:7"),
        ("tp2:2,tp1:2 @3 | tp1:4 @1 | tp1:2,tp2:2 @2", "a b c", "a|b c"),
    )
    for changes, flags in (({}, OVERLAP), (LLAMA_LIKE, (ZERO,)), (LLAMA_LIKE, (ZERO, *OVERLAP)))
}  # fmt: skip


def plan_of(case: Case) -> Plan:
    layout, machines, text, *_ = case
    words = [[word.partition(":") for word in group.split()] for group in text.split("|")]
    groups = [[name for name, _, _ in group] for group in words]
    uplinks = [[int(uplink) for *_, uplink in group] for group in words] if ":" in text else []
    return on_machines(layout, machines.split(), groups, uplinks)


def require_equal(case: Case, folder: Path, optimizers: tuple[str, ...] = OPTIMIZERS) -> None:
    *_, changes, flags = case
    options = Options(steps=2, optimizers=optimizers, plan_flags=flags)
    outcome = verify(plan_of(case), workload(**changes), options, folder)
    assert outcome.ok, outcome_to_data(outcome)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("2 and 1 holders of unlike depth", marks=pytest.mark.slow),
        "pairs between two and two",
        "divided, unlike depth",
        "unlike uplinks, each machine a group",
        "unlike uplinks, divided, unlike widths",
    ],
)
def test_training_by_groups_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    """Sums are seen in what SGD does, divided sums in the state that Adam divides alike."""
    *_, flags = CASES[name]
    require_equal(CASES[name], tmp_path, ("adam",) if ZERO in flags else ("sgd",))


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_plans_by_groups_train_as_one_process(name: str, tmp_path: Path) -> None:
    require_equal(MORE[name], tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("2 and 1 holders of unlike depth", marks=pytest.mark.slow),
        "unlike uplinks, each machine a group",
        pytest.param("pairs between two and two", marks=pytest.mark.slow),
    ],
)
def test_bits_are_equal_on_all_holders_and_from_run_to_run(name: str, tmp_path: Path) -> None:
    """`whole_weights` refuses holders that differ in a bit."""
    jobs = VerifyJobs(shrink(plan_of(CASES[name]), workload()), Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    argv = [*jobs.training_arguments("adam"), *OVERLAP, "--save-interval=1000"]
    runs = [train(tmp_path / str(n), jobs.shrunk.plan, argv) for n in range(2)]
    steps = max(int(key.split("/")[1]) for key in runs[0][0].arrays if key.startswith("weight/"))
    assert whole_weights(runs[0], steps) == whole_weights(runs[1], steps)
