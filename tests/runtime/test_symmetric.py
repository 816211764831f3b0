"""Symmetric plans: equal to plain Megatron to the last bit.

Plain Megatron is its stock entry with stock flags on the same CPU bridge, from the same seed
checkpoint.  `entry.main` hands such a plan over to it.  Our own groups, boundaries, gradient sync
and data division, made to run the plan all the same, must not differ either; there clipping is off,
because our norm adds up over all replicas' ranks (the same bits everywhere), Megatron's over one's,
and embeddings are untied, because our sync adds up all four copies of one at once, Megatron's two
and two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord, read_record
from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.file import save_plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.arguments import split_arguments
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.schedule.stock import is_stock
from tests.runtime.workloads import plan, workload

CASES = {
    "TP": ("tp2:4 @4", ["--tensor-model-parallel-size=2"]),
    "PP": ("tp1:2,tp1:2 @4", ["--pipeline-model-parallel-size=2"]),
    "uneven PP": (
        "tp1:3,tp1:1 @4",
        ["--pipeline-model-parallel-size=2", "--pipeline-model-parallel-layout=Ettt|tL"],
    ),
    "DP": ("tp1:4 @2 | tp1:4 @2", []),
    "TP x PP x DP": (
        "tp2:2,tp2:2 @2 | tp2:2,tp2:2 @2",
        [
            "--tensor-model-parallel-size=2",
            "--pipeline-model-parallel-size=2",
            "--use-tp-pp-dp-mapping",
        ],
    ),
}


_SLOW = {"TP", "PP"}
"""Parts of "TP x PP x DP"."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW)) for n in CASES]
)
def test_a_symmetric_plan_is_plain_megatron(name: str, tmp_path: Path) -> None:
    layout, stock_flags = CASES[name]
    shrunk = shrink(plan(layout), workload(tied_embeddings=False, per_token_loss=name == "DP"))
    jobs = VerifyJobs(shrunk, Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    ours_flags = (*jobs.training_arguments("adam"), f"--hetero-layout={layout}")
    plain_flags = (*jobs.training_arguments("adam"), *stock_flags, *backend.CPU_FLAGS)

    def run_plain(*more: str) -> Callable[[Recorder], None]:
        def run(recorder: Recorder) -> None:
            backend.activate_cpu_backend()
            entry.train_stock((*plain_flags, *more), entry.World.from_environment(), recorder)

        return run

    def run_entry(recorder: Recorder) -> None:
        entry.main(ours_flags, recorder)

    def run_ours(recorder: Recorder) -> None:
        backend.activate_cpu_backend()
        arguments = split_arguments((*ours_flags, *backend.CPU_FLAGS, "--clip-grad=0"))
        entry.train_asymmetric(plan(layout), arguments, entry.World.from_environment(), recorder)

    num_ranks = shrunk.plan.layout.num_devices
    runs = {
        kind: _train(kind, run, num_ranks, tmp_path)
        for kind, run in (
            ("plain", run_plain()),
            ("entry", run_entry),
            ("plain without clipping", run_plain("--clip-grad=0")),
            ("ours without clipping", run_ours),
        )
    }
    for rank in range(num_ranks):
        assert _bits(runs["entry"][rank]) == _bits(runs["plain"][rank])
        assert runs["entry"][rank].norms == runs["plain"][rank].norms
        assert _bits(runs["ours without clipping"][rank]) == _bits(
            runs["plain without clipping"][rank]
        )


DROPOUT = ["--hidden-dropout=0.2", "--attention-dropout=0.1"]
FLAGS = {
    "SP": ("tp2:4 @4", ["--tensor-model-parallel-size=2"], ["--sequence-parallel"]),
    "overlap": ("tp1:4 @2 | tp1:4 @2", [], ["--overlap-grad-reduce"]),
    "ZeRO-1": ("tp1:4 @2 | tp1:4 @2", [], ["--use-distributed-optimizer"]),
    "ZeRO-1, overlap": (
        "tp1:4 @2 | tp1:4 @2",
        [],
        ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"],
    ),
    "dropout, SP": (
        "tp2:4 @4",
        ["--tensor-model-parallel-size=2"],
        ["--sequence-parallel", *DROPOUT],
    ),
    "dropout, PP": ("tp1:2,tp1:2 @4", ["--pipeline-model-parallel-size=2"], DROPOUT),
    "dropout, DP": ("tp1:4 @2 | tp1:4 @2", [], DROPOUT),
}


_SLOW_FLAGS = {"SP", "overlap", "ZeRO-1"}
"""Parts of "dropout, SP" and of "ZeRO-1, overlap"."""


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in _SLOW_FLAGS)) for n in FLAGS]
)
def test_our_own_parts_have_the_bits_of_megatrons(name: str, tmp_path: Path) -> None:
    """Our sync and divided optimizer, made to run what Megatron's own can, beside Megatron's."""
    layout, stock_flags, flags = FLAGS[name]
    shrunk = shrink(plan(layout), workload(tied_embeddings=False))
    jobs = VerifyJobs(shrunk, Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    common = (*jobs.training_arguments("adam"), *flags, *backend.CPU_FLAGS, "--clip-grad=0")

    def run_plain(recorder: Recorder) -> None:
        backend.activate_cpu_backend()
        entry.train_stock((*common, *stock_flags), entry.World.from_environment(), recorder)

    def run_ours(recorder: Recorder) -> None:
        backend.activate_cpu_backend()
        arguments = split_arguments((*common, f"--hetero-layout={layout}"))
        entry.train_asymmetric(plan(layout), arguments, entry.World.from_environment(), recorder)

    plain, ours = (
        _train(kind, run, 2, tmp_path) for kind, run in (("plain", run_plain), ("ours", run_ours))
    )
    # Megatron's distributed optimizer leaves a rank the sums of its own part of the gradients, and
    # with overlapped gathers the others' weights of before until the next forward pass.
    kinds = {"ZeRO-1": ("weight",), "ZeRO-1, overlap": ()}.get(name, ("weight", "gradient"))
    for rank in range(2):
        assert ours[rank].losses == plain[rank].losses
        for key, array in plain[rank].arrays.items():
            if key.startswith(kinds):
                assert array.tobytes() == ours[rank].arrays[key].tobytes(), key


def test_interleaved_stages_are_plain_megatrons(tmp_path: Path) -> None:
    """Two chunks on each of two stages, against Megatron's own interleaved schedule."""
    asked = with_interleaving(plan("tp1:2,tp1:2 @4"), 0, [(0, 1), (1, 1), (0, 1), (1, 1)])
    shrunk = shrink(asked, workload(tied_embeddings=False))
    jobs = VerifyJobs(shrunk, Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    save_plan(asked, tmp_path / "plan.json")
    common = (*jobs.training_arguments("adam"), *backend.CPU_FLAGS, "--clip-grad=0")

    def run_plain(recorder: Recorder) -> None:
        backend.activate_cpu_backend()
        stages = ("--pipeline-model-parallel-size=2", "--pipeline-model-parallel-layout=Et|t|t|tL")
        entry.train_stock((*common, *stages), entry.World.from_environment(), recorder)

    def run_ours(recorder: Recorder) -> None:
        backend.activate_cpu_backend()
        arguments = split_arguments((*common, f"--hetero-plan={tmp_path / 'plan.json'}"))
        entry.train_asymmetric(asked, arguments, entry.World.from_environment(), recorder)

    def run_entry(recorder: Recorder) -> None:
        entry.main((*common, f"--hetero-plan={tmp_path / 'plan.json'}"), recorder)

    assert is_stock(asked)
    plain, ours, handed_over = (
        _train(name, run, 2, tmp_path)
        for name, run in (("plain", run_plain), ("ours", run_ours), ("entry", run_entry))
    )
    for rank in range(2):
        assert _bits(ours[rank]) == _bits(plain[rank])
        assert _bits(handed_over[rank]) == _bits(plain[rank])
        assert handed_over[rank].norms == plain[rank].norms


def _train(
    name: str, run: Callable[[Recorder], None], num_ranks: int, folder: Path
) -> Sequence[RankRecord]:
    def rank_function(rank: int) -> None:
        recorder = Recorder()
        run(recorder)
        recorder.save(folder / name / f"record-{rank}")

    run_jobs([LocalJob(name, num_ranks, rank_function, folder / name)], 120)
    return [read_record(folder / name / f"record-{rank}") for rank in range(num_ranks)]


def _bits(record: RankRecord) -> tuple[object, ...]:
    """Losses, gradients and weights of all steps, as bits."""
    assert record.steps == (1, 2)
    return (
        {step: loss.hex() for step, loss in record.losses.items()},
        {key: array.tobytes() for key, array in record.arrays.items()},
    )
