"""Flags, refusals and faults of a job with `--hetero-sequences`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megatron_hetero.errors import (
    FileFormatError,
    HeteroError,
    InfeasiblePlanError,
    UnsupportedError,
)
from megatron_hetero.runtime.job.arguments import split_arguments
from megatron_hetero.runtime.job.flexible_sequences import sequences_plan
from megatron_hetero.runtime.job.local.jobs import RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.steps import job_of
from megatron_hetero.runtime.sequences import steps
from tests.runtime.sequences.flexible_runs import (
    SMALL,
    flexible_job,
    random_step,
    write_cluster,
    write_documents,
)

FLEXIBLE = "--hetero-sequences=flexible"


@pytest.fixture
def cluster(tmp_path: Path) -> Path:
    return write_cluster(tmp_path / "cluster.yaml", a=("FAST", 2))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([FLEXIBLE, "CLUSTER", "--hetero-layout=tp1:1,tp1:1 @6"], "--global-batch-size 8"),
        ([FLEXIBLE, "CLUSTER", "--hetero-layout=tp1cp2:2 @8"], r"context parallelism \(cp\)"),
        ([FLEXIBLE, "CLUSTER", "--hetero-layout=tp1:2 @8"], "takes 1 GPUs"),
        (["--hetero-cluster=c.yaml"], "--hetero-cluster is for --hetero-sequences"),
        (["--hetero-profile=c.json"], "--hetero-profile is for --hetero-sequences"),
        ([FLEXIBLE], "--hetero-sequences needs --hetero-cluster FILE"),
        ([FLEXIBLE, "CLUSTER", "--micro-batch-size=2"], "--micro-batch-size 2: with --hetero-seq"),
        ([FLEXIBLE, "CLUSTER", "--dataloader-type=cyclic"], "--dataloader-type cyclic"),
        ([FLEXIBLE, "CLUSTER", "--tensor-model-parallel-size=2"], "tensor-model-parallel-size"),
        ([FLEXIBLE, "CLUSTER", "--context-parallel-size=2"], "context-parallel-size"),
        ([FLEXIBLE, "CLUSTER", "--pipeline-model-parallel-size=2"], "pipeline-model-parallel-si"),
        ([FLEXIBLE, "CLUSTER", "--global-batch-size=1"], "--global-batch-size 1"),
        ([FLEXIBLE, "CLUSTER", "--hetero-timeline=t.json"], "--hetero-timeline does not go"),
        ([FLEXIBLE, "CLUSTER", "--hetero-on-loss=replan"], "replan does not go"),
    ],
)
def test_flags_that_contradict_each_other(
    flags: Sequence[str], message: str, cluster: Path
) -> None:
    given = [f"--hetero-cluster={cluster}" if f == "CLUSTER" else f for f in flags]
    with pytest.raises(HeteroError, match=message):
        job_of([*SMALL, "--global-batch-size=8", *given])


def test_a_script_of_the_users_own_is_refused(cluster: Path) -> None:
    with pytest.raises(UnsupportedError, match="a script's own batches are of one length"):
        job_of([*SMALL, FLEXIBLE, f"--hetero-cluster={cluster}"], of_a_script=True)


def test_every_gpu_is_a_rank(cluster: Path) -> None:
    flags = [*SMALL, FLEXIBLE, f"--hetero-cluster={cluster}", "--global-batch-size=5"]
    plan = sequences_plan(split_arguments(flags))
    assert str(plan.layout) == "tp1:2 @3x1 | tp1:2 @2x1"
    with pytest.raises(FileFormatError, match=r"yaml\.none: cannot be read"):
        sequences_plan(split_arguments([*flags, f"--hetero-cluster={cluster}.none"]))


def test_a_document_longer_than_the_positions_ends_the_job_before_its_first_step(
    cluster: Path, tmp_path: Path
) -> None:
    write_documents(tmp_path / "text", (4, 300, 5))
    flags = [f"--data-path={tmp_path / 'text'}", "--global-batch-size=2"]
    with pytest.raises(RankFailedError, match=r"document 1 of .*text has 300 tokens") as ended:
        run_jobs([flexible_job(tmp_path / "ours", cluster, 2, flags)], 60)
    assert ended.value.exit_code == InfeasiblePlanError.exit_code


@pytest.mark.slow
def test_a_step_that_cannot_be_dealt_ends_all_ranks_alike(cluster: Path, tmp_path: Path) -> None:
    write_documents(tmp_path / "text", (4, 7, 5))

    def begin(rank: int) -> None:
        calls: list[int] = []

        def deal(tree: Any, documents: steps.Documents) -> steps.Dealt:
            calls.append(rank)
            if len(calls) == 2:
                raise InfeasiblePlanError("nobody can hold it")
            return random_step(tree, documents, random.Random(1)), ""

        steps.dealt_tokens = deal

    flags = [f"--data-path={tmp_path / 'text'}", "--global-batch-size=2"]
    made = flexible_job(tmp_path / "ours", cluster, 2, flags, begin)
    with pytest.raises(RankFailedError) as ended:
        run_jobs([made], 60)
    assert ended.value.exit_code == InfeasiblePlanError.exit_code
    for rank in range(2):
        log = (made.directory / f"rank-{rank}.log").read_text()
        assert "nobody can hold it" in log
