"""Job files of NVIDIA's tree become small jobs with their own flags; the page has the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import start_nvidia_jobs

from megatron_hetero.errors import UsageError

JOB = """
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --tensor-model-parallel-size: 2
  --microbatch-group-size-per-virtual-pipeline-stage: 2
  --error-injection-rate: 100
  --seed: ${REPEAT}
  --clip-grad: 0.5
  --bf16: true
"""


def test_flags_that_divide_the_job_are_the_plans() -> None:
    flags = start_nvidia_jobs.megatron_flags(JOB)
    assert flags[:2] == ("--num-layers", "12")
    assert "--clip-grad" in flags
    assert not {w for w in flags if "parallel" in w or "pipeline" in w or "injection" in w}


def test_alike_small_jobs_are_one(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(JOB)
    (tmp_path / "other.yaml").write_text(JOB.replace("size: 2", "size: 4"))
    (tmp_path / "third.yaml").write_text(JOB.replace("0.5", "0.25"))
    one, other, third = (
        start_nvidia_jobs.small_job(tmp_path / f"{name}.yaml", name).key
        for name in ("one", "other", "third")
    )
    assert one == other != third


def test_flags_that_megatron_would_not_read_are_said(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("MODEL_ARGS: {--num-layers: many}")
    with pytest.raises(UsageError, match="many"):
        start_nvidia_jobs.small_job(tmp_path / "job.yaml", "job")


def test_the_page_is_printed_from_the_results() -> None:
    results = json.loads(start_nvidia_jobs.RESULTS.read_text(encoding="utf-8"))
    page = start_nvidia_jobs.PAGE.read_text(encoding="utf-8")
    assert page == start_nvidia_jobs.page(results)
