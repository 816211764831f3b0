"""A job that was killed goes on with the documents that it would have read."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest

from megatron_hetero.runtime.job.local.jobs import RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.sequences.flexible_runs import (
    flexible_job,
    records,
    token_losses,
    write_cluster,
    write_documents,
)
from tests.runtime.sequences.test_equality import LENGTHS, LLAMA


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [None, "tp1:1,tp1:1 @3 | tp1:2 @2"], ids=["single GPUs", "pipelines"]
)
def test_killed_and_resumed(layout: str | None, tmp_path: Path) -> None:
    """Beyond the end of an epoch too: 6 steps of 5 are more than twice the 13 documents."""
    write_documents(tmp_path / "text", LENGTHS)
    cluster = write_cluster(tmp_path / "cluster.yaml", a=("FAST", 2), b=("SLOW", 1))
    flags = [
        *LLAMA, f"--data-path={tmp_path / 'text'}", "--global-batch-size=5", "--train-iters=6",
        "--optimizer=adam", "--eval-iters=1", "--eval-interval=2", "--split=13,3,0",
        *([] if layout is None else [f"--hetero-layout={layout}"]),
    ]  # fmt: skip
    saving = [*flags, f"--save={tmp_path / 'save'}", f"--load={tmp_path / 'save'}"]
    whole = flexible_job(tmp_path / "whole", cluster, 3, flags)
    killed = [*saving, "--save-interval=2", "--hetero-drill=kill@1:4:gradient-sync"]
    with pytest.raises(RankFailedError):
        run_jobs([flexible_job(tmp_path / "killed", cluster, 3, killed)], 120)
    resumed = flexible_job(tmp_path / "resumed", cluster, 3, [*saving, "--save-interval=100"])
    run_jobs([whole, resumed], 120)
    losses, gone_on = records(whole)[-1].losses, records(resumed)[-1].losses
    assert gone_on == {step: losses[step] for step in (3, 4, 5, 6)}
    rows = token_losses(whole.directory, 3)
    later = token_losses(resumed.directory, 3)
    assert numpy.array_equal(rows[rows[:, 4] > 2], later)
    logs = [(job.directory / "rank-2.log").read_text() for job in (whole, resumed)]
    validated = [
        re.findall(r"validation loss at iteration \d .*?lm loss value: (\S+)", log) for log in logs
    ]
    assert len(validated[0]) == 4 and validated[1] == validated[0][1:]
