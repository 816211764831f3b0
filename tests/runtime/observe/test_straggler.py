"""Megatron's straggler detector on ranks of unequal work."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.batches import with_micro_batch_sizes
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.observe.straggler import flops_part
from tests.runtime.workloads import LLAMA_LIKE, plan, workload


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("tp2:3,tp1:1 @4 | tp1:4 @2", {}),
        ("tp3(2:1:1):2,tp2(1:3):2 @3 | tp2cp2:4 @3", LLAMA_LIKE),
        ("tp1:4 @2x2 | tp1:1,tp1:3 @2", {"num_experts": 4, "moe_router_topk": 2}),
    ],
)
def test_parts_of_all_ranks_are_the_whole_step(layout: str, changes: dict[str, object]) -> None:
    asked = with_micro_batch_sizes(plan(layout), 1)
    table = rank_table(asked)
    given = workload(
        **{**changes, "moe_ffn_hidden_size": 192} if "num_experts" in changes else changes
    )
    parts = [flops_part(asked, given, position) for position in table]
    assert sum(parts) == pytest.approx(1, rel=1e-3)


def test_a_rank_of_more_layers_and_micro_batches_has_the_larger_part() -> None:
    asked = with_micro_batch_sizes(plan("tp1:3,tp1:1 @4 | tp1:4 @2"), 1)
    first, second, whole = (flops_part(asked, workload(), p) for p in rank_table(asked))
    assert first > second and first + second == pytest.approx(4 / 6)
    assert whole == pytest.approx(2 / 6)


def test_without_a_gpu_training_goes_on_and_the_detector_stays_off(tmp_path: Path) -> None:
    """Ranks still ask rank 0 at every log if they are to begin, as in Megatron."""
    layout = "tp1:3,tp1:1 @4 | tp1:4 @2"
    jobs = VerifyJobs(shrink(plan(layout), workload()), Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    argv = (*jobs.training_arguments("adam"), f"--hetero-layout={layout}", "--log-straggler")

    def train(rank: int) -> None:
        entry.main((*argv, f"--data-cache-path={tmp_path / 'cache'}"))
        from megatron.training.training import stimer

        assert not stimer.enabled and stimer.ctrlr is None

    run_jobs([LocalJob("watched", 3, train, tmp_path / "watched")], 120)
    log = (tmp_path / "watched" / "rank-2.log").read_text()
    assert log.count("lm loss:") == 2 and "Etpt" not in log
