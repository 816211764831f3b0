"""The groups that ranks of real jobs make are those that are counted, and every one is used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron_hetero.cost.sync.communicators import job_communicators
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.lab.verify.small.text import VOCAB_SIZE
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.gradients.groups import pair_group
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.parallel.pipeline import always_send_parts
from tests.runtime.on_machines import on_machines
from tests.runtime.workloads import LLAMA_LIKE, MIXTRAL_LIKE, plan, workload

CASES: dict[str, tuple[str | Plan, dict[str, Any]]] = {
    "unlike depth": ("tp2:3,tp1:1 @4 | tp1:4 @2", {}),
    "groups of machines": (
        on_machines("tp1:4 @1 | tp1:4 @1 | tp1:4 @1 | tp1:4 @1", "abcd", ["ab", "cd"]),
        {},
    ),
    "sequence parallel, untied": (
        "tp2:2,tp2:2 @3 | tp1:4 @3",
        {"sequence_parallel": True, **LLAMA_LIKE},
    ),
    "further tokens, untied": (
        "tp1:1,tp3(2:1:1):3 @4 | tp1:4 @2",
        {**LLAMA_LIKE, "mtp_num_layers": 1},
    ),
    "experts dealt out": (
        "tp3ep3(2:1:1):2,tp1:2 @3 | tp2(1:3)ep2(3:1):4 @2",
        MIXTRAL_LIKE,
    ),
}


@pytest.mark.parametrize(
    "name", ["unlike depth", *(pytest.param(n, marks=pytest.mark.slow) for n in list(CASES)[1:])]
)
def test_ranks_make_the_groups_that_are_counted(name: str, tmp_path: Path) -> None:
    asked_for, changes = CASES[name]
    made_from = plan(asked_for) if isinstance(asked_for, str) else asked_for
    shrunk = shrink(made_from, workload(**changes))
    jobs = VerifyJobs(shrunk, Options(steps=1), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    save_plan(shrunk.plan, tmp_path / "plan.json")
    argv = [
        *jobs.training_arguments("adam"),
        *shrunk.plan_args,
        f"--hetero-plan={tmp_path / 'plan.json'}",
        f"--data-cache-path={tmp_path / 'cache'}",
    ]

    def train(rank: int) -> None:
        used: set[str] = set()
        always_send_parts()
        _note_use(used)
        entry.main(argv)
        groups = [
            (sorted(ranks), group.group_name in used)
            for group, ranks in distributed_c10d._world.pg_group_ranks.items()
            if isinstance(group, dist.ProcessGroup) and len(ranks) > 1
        ]
        (tmp_path / f"groups-{rank}.json").write_text(json.dumps(groups))

    run_jobs([LocalJob("groups", shrunk.plan.layout.num_devices, train, tmp_path)], 120)
    asked = workload(**changes)
    model = replace(shrunk.model, vocab_size=VOCAB_SIZE, make_vocab_size_divisible_by=4)
    counted = job_communicators(shrunk.plan, replace(asked, model=model))
    for rank in range(shrunk.plan.layout.num_devices):
        made = json.loads((tmp_path / f"groups-{rank}.json").read_text())
        expected = sorted(sorted(c.ranks) for c in counted if rank in c.ranks)
        assert sorted(ranks for ranks, _ in made) == expected
        assert [ranks for ranks, is_used in made if not is_used] == []


def _note_use(used: set[str]) -> None:
    """Note the names of the groups through which this process sends or receives."""
    names = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor",
             "all_to_all_single", "barrier", "all_gather", "batch_isend_irecv")  # fmt: skip
    for name in names:
        setattr(dist, name, _noted(getattr(dist, name), used))
    pair_group.all_reduce = _noted(pair_group.all_reduce, used)


def _noted(function: Any, used: set[str]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        messages = [
            op.group
            for one in given
            if isinstance(one, list)
            for op in one
            if isinstance(op, dist.P2POp)
        ]
        groups = messages or [one for one in given if isinstance(one, dist.ProcessGroup)]
        used.update(group.group_name for group in groups or [dist.group.WORLD])
        return function(*args, **kwargs)

    return call
