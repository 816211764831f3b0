"""Flexible sequences train as one process of stock Megatron, document by document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest

from megatron_hetero.runtime.job.local_launch import run_jobs
from tests.runtime.sequences.flexible_runs import (
    deal_at_random,
    flexible_job,
    records,
    stock_job,
    token_losses,
    write_cluster,
    write_documents,
)

LLAMA = (
    "--swiglu", "--group-query-attention", "--num-query-groups=2", "--normalization=RMSNorm",
    "--disable-bias-linear", "--position-embedding-type=rope",
    "--untie-embeddings-and-output-weights",
)  # fmt: skip
LENGTHS = (1, 2, 3, 5, 8, 13, 17, 30, 41, 64, 77, 1, 4, 9)
CASES: dict[str, tuple[dict[str, tuple[str, int]], tuple[str, ...], int]] = {
    "two alike": ({"a": ("FAST", 2)}, LLAMA, 0),
    "unlike, learned positions": ({"a": ("FAST", 2), "b": ("SLOW", 1)}, (), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_a_random_deal_trains_as_one_process(name: str, tmp_path: Path) -> None:
    nodes, flags, seed = CASES[name]
    write_documents(tmp_path / "text", LENGTHS, seed)
    cluster = write_cluster(tmp_path / "cluster.yaml", **nodes)
    num_ranks = sum(count for _, count in nodes.values())
    asked = [*flags, f"--data-path={tmp_path / 'text'}", "--global-batch-size=7"]
    ours = flexible_job(tmp_path / "ours", cluster, num_ranks, asked, deal_at_random(seed))
    one = stock_job(tmp_path / "one", asked)
    run_jobs([ours, one], 120)
    limit = 2e-5 if flags else 5e-6
    assert_equal(ours, one, limit)


def assert_equal(ours: Any, one: Any, limit: float) -> None:
    """Per-token losses, losses of steps, and gradients on every rank."""
    (reference,) = records(one)
    ranks = records(ours)
    assert ranks[-1].losses == pytest.approx(reference.losses, rel=1e-6)
    mine, theirs = token_losses(ours.directory, ours.num_ranks), token_losses(one.directory, 1)
    assert mine[:, :3].tolist() == theirs[:, :3].tolist()
    numpy.testing.assert_allclose(mine[:, 3], theirs[:, 3], rtol=1e-6 * 20, atol=1e-6)
    for record in ranks:
        for name, wanted in reference.arrays.items():
            if name.startswith("gradient/"):
                scale = numpy.abs(wanted).max()
                far = numpy.abs(record.arrays[name] - wanted).max()
                assert far <= limit * scale, (name, far, scale)
