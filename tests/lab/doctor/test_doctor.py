"""The preflight on machines, with real processes over gloo: sound ranks, wrong sums, hangs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.lab.doctor.command import CheckOutcome, examine_machines, leave
from megatron_hetero.plan.plan import Plan
from megatron_hetero.preflight.groups import group_tests
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.preflight.jobs import with_width

PLAN, CLUSTER = with_width(
    (("a", "A100-80GB", 2), ("b", "A100-80GB", 2)), "tp2:5,tp1:3 @12 | tp1:8 @4"
)


def examine(
    folder: Path, fault: Callable[[int], None] = lambda rank: None, limit_s: float = 20.0
) -> tuple[Plan, Cluster, list[dict[str, Any]]]:
    """Every rank's outcome, with `fault(rank)` planted in each process before it begins."""

    def rank_main(rank: int) -> None:
        fault(rank)
        outcome: CheckOutcome = examine_machines(PLAN, CLUSTER, limit_s, meet_s=40.0)
        data = {
            "findings": [(f.id, f.where, f.what) for f in outcome.findings],
            "tested": outcome.tested,
            "facts": len(outcome.facts),
        }
        (folder / f"{rank}.json").write_text(json.dumps(data))
        leave(bool(outcome.findings), 0)

    run_jobs([LocalJob("doctor", 4, rank_main, folder)], timeout_s=100.0)
    return PLAN, CLUSTER, [json.loads((folder / f"{r}.json").read_text()) for r in range(4)]


def ids(outcome: dict[str, Any]) -> set[str]:
    return {id_ for id_, *_ in outcome["findings"]}


def test_sound_ranks_pass_every_group(tmp_path: Path) -> None:
    *_, outcomes = examine(tmp_path)
    for outcome in outcomes:
        assert ids(outcome) == set()
        assert outcome["tested"] == [test.name for test in group_tests(PLAN)]
        assert outcome["facts"] == 4


def test_a_wrong_sum_is_found_with_its_rank(tmp_path: Path) -> None:
    def fault(rank: int) -> None:
        if rank == 2:
            right = dist.all_reduce

            def wrong(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
                work = right(tensor, *args, **options)
                work.wait()
                tensor[-1] += 1
                return work

            dist.all_reduce = wrong

    *_, outcomes = examine(tmp_path, fault)
    assert ids(outcomes[0]) == {"collective-wrong-values"}
    (where,) = {w for id_, w, _ in outcomes[0]["findings"] if id_ == "collective-wrong-values"}
    assert where.endswith("rank 2")


def test_a_message_with_other_values_is_found(tmp_path: Path) -> None:
    def fault(rank: int) -> None:
        if rank == 0:
            right = dist.batch_isend_irecv

            def wrong(operations: list[Any]) -> Any:
                for operation in operations:
                    if operation.op is dist.isend:
                        operation.tensor = operation.tensor + 1
                return right(operations)

            dist.batch_isend_irecv = wrong

    *_, outcomes = examine(tmp_path, fault)
    assert ids(outcomes[0]) == {"message-wrong-values"}


def test_a_rank_that_hangs_is_found_in_time(tmp_path: Path) -> None:
    def fault(rank: int) -> None:
        if rank == 1:
            dist.all_reduce = lambda *args, **options: time.sleep(6) or os._exit(0)

    with pytest.raises(FileNotFoundError):  # rank 1 comes to no end of its own
        examine(tmp_path, fault, limit_s=1.0)
    outcome = json.loads((tmp_path / "0.json").read_text())
    assert ids(outcome) == {"collective-hangs"}
    assert any("tensor parallel, replica 0" in where for _, where, _ in outcome["findings"])
    assert outcome["tested"] == []
