"""Plans on hosts, whose order decides the ranks: rank 0 may be any place, an inner stage too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord, read_record
from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Host, Plan
from megatron_hetero.plan.ranks import Position, positions
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.workloads import plan, workload


def on_hosts(layout: str, order: Sequence[int]) -> Plan:
    """`layout` on hosts of one GPU each; `order` has, rank by rank, the number of its place."""
    asked = plan(layout)
    places = positions(asked.layout)
    host_of = {places[number]: f"node-{rank}" for rank, number in enumerate(order)}
    replicas = [
        replace(
            replica,
            stages=tuple(
                replace(
                    stage,
                    devices=tuple(
                        f"{host_of[Position(r, s, t)]}:0"
                        for t in range(stage.shape.tensor_parallel)
                    ),
                )
                for s, stage in enumerate(replica.stages)
            ),
        )
        for r, replica in enumerate(asked.replicas)
    ]
    hosts = tuple(Host(f"node-{rank}", f"h{rank}", "RTX-4090", (0,)) for rank in range(len(order)))
    return replace(asked, replicas=tuple(replicas), hosts=hosts)


def train(asked: Plan, flags: Sequence[str], folder: Path) -> list[RankRecord]:
    """Two steps of `asked`, without a seed checkpoint; what each rank saw."""
    jobs = VerifyJobs(shrink(asked, workload()), Options(steps=2), folder)
    run_jobs([jobs.seed_job()], 120)
    given = [
        argument
        for argument in jobs.training_arguments("sgd")
        if not argument.startswith(("--load", "--finetune", "--no-load", "--exit-on"))
    ]
    path = folder / "plan.json"
    save_plan(asked, path)
    argv = [*given, f"--hetero-plan={path}", f"--data-cache-path={folder / 'cache'}", *flags]

    def rank_function(rank: int) -> None:
        recorder = Recorder()
        entry.main(argv, recorder)
        recorder.save(folder / f"record-{rank}")

    num_ranks = len(asked.hosts)
    run_jobs([LocalJob("plan", num_ranks, rank_function, folder)], 120)
    return [read_record(folder / f"record-{rank}") for rank in range(num_ranks)]


def test_a_last_stage_that_comes_first_does_not_give_its_empty_embedding(tmp_path: Path) -> None:
    """Megatron draws a tied embedding on the first stage and leaves zeros on the last one."""
    asked = on_hosts("tp1:2,tp1:2 @4 | tp1:4 @2", (1, 0, 2))
    records = train(asked, ["--hetero-init=megatron"], tmp_path)
    first, *others = [r.arrays["weight/0/embedding.word_embeddings.weight"] for r in records]
    assert numpy.abs(first).max() > 0
    assert all(numpy.array_equal(first, other) for other in others)


def test_an_inner_stage_as_rank_0_knows_that_there_is_no_test_set(tmp_path: Path) -> None:
    """Rank 0 tells all others whether to validate and to test, though it reads no data itself."""
    asked = on_hosts("tp1:1,tp2:2,tp1:1 @4 | tp1:4 @2", (1, 2, 0, 3, 4))
    flags = ["--split=9,1,0", "--eval-iters=1", "--eval-interval=1"]
    records = train(asked, flags, tmp_path)
    assert all(len(record.steps) == 2 for record in records)
    log = (tmp_path / "rank-4.log").read_text()
    assert log.count("validation loss at iteration") >= 2
    assert "on test set" not in log
