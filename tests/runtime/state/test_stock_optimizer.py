"""State of stock's distributed optimizer: read under any plan, and written for stock to go on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.schedule.stock import is_stock
from tests.runtime.runs import train
from tests.runtime.workloads import LLAMA_LIKE, MIXTRAL_LIKE, plan, workload

DIVIDED = "--use-distributed-optimizer"
FORM = "--dist-ckpt-optim-fully-reshardable"
DEEP = "tp2:3,tp1:1 @4 | tp1:4 @2"
UNEVEN = "tp3(2:1:1):3,tp2(3:1):1 @4 | tp1:4 @2"
SAVED_AT, LAST = 2, 4


class Runs:
    """Runs of one model from one seed, under plans and under stock Megatron."""

    def __init__(self, folder: Path, changes: dict[str, object]) -> None:
        common = shrink(plan(UNEVEN), workload(per_token_loss=True, **changes))
        jobs = VerifyJobs(replace(common, plan=plan(UNEVEN)), Options(steps=LAST), folder)
        run_jobs([jobs.seed_job()], 120)
        given = jobs.training_arguments("adam")
        self.from_seed = [a for a in given if not a.startswith("--train-iters")]
        start = ("--load=", "--finetune", "--no-load-optim")
        self.resumed = [a for a in self.from_seed if not a.startswith(start)]
        self.folder, self.multiple = folder, common.vocab_multiple

    def stock(self, name: str, argv: Sequence[str], num_ranks: int = 2) -> list[RankRecord]:
        """Replicas of the whole model, each on one rank."""
        multiple = f"--make-vocab-size-divisible-by={self.multiple}"
        own = [*argv, multiple, *backend.CPU_FLAGS]
        return train(self.folder / name, None, own, num_ranks=num_ranks)

    def ours(self, name: str, layout: str, argv: Sequence[str]) -> list[RankRecord]:
        widths = plan(layout).layout.tensor_parallel_widths
        multiple = f"--make-vocab-size-divisible-by={self.multiple // lcm(*widths)}"
        return train(self.folder / name, layout, [*argv, multiple])


def saving(folder: Path, last: int) -> list[str]:
    return [f"--save={folder}", f"--save-interval={SAVED_AT}", f"--train-iters={last}"]


def check_same(one: Sequence[RankRecord], other: Sequence[RankRecord]) -> None:
    """Losses and norms of the steps after the checkpoint."""
    for step in range(SAVED_AT + 1, LAST + 1):
        of_one, of_other = (
            next(record.losses[step] for record in ranks if step in record.losses)
            for ranks in (one, other)
        )
        assert of_one == pytest.approx(of_other, rel=1e-6)
        norms = [float.fromhex(ranks[0].norms[step]) for ranks in (one, other)]
        assert norms[0] == pytest.approx(norms[1], rel=2e-6)


@pytest.mark.parametrize(
    ("layout", "changes", "flags"),
    [
        (DEEP, {}, [DIVIDED]),
        pytest.param(UNEVEN, LLAMA_LIKE, [DIVIDED], marks=pytest.mark.slow),
        pytest.param(UNEVEN, LLAMA_LIKE, [], marks=pytest.mark.slow),
        pytest.param(UNEVEN, MIXTRAL_LIKE, [DIVIDED], marks=pytest.mark.slow),
    ],
    ids=["divided", "uneven, divided", "uneven, whole", "experts"],
)
def test_a_plan_goes_on_from_stocks_distributed_optimizer(
    layout: str, changes: dict[str, object], flags: list[str], tmp_path: Path
) -> None:
    runs = Runs(tmp_path, changes)
    saved = tmp_path / "saved"
    stock = runs.stock("stock", [*runs.from_seed, DIVIDED, FORM, *saving(saved, LAST)])
    (saved / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    ours = runs.ours(
        "ours", layout, [*runs.resumed, *flags, f"--train-iters={LAST}", f"--load={saved}"]
    )
    check_same(ours, stock)


@pytest.mark.slow
def test_stocks_distributed_optimizer_goes_on_from_a_plan(tmp_path: Path) -> None:
    runs = Runs(tmp_path, LLAMA_LIKE)
    saved = tmp_path / "saved"
    runs.ours("ours", UNEVEN, [*runs.from_seed, DIVIDED, FORM, *saving(saved, SAVED_AT)])
    resumed = [*runs.resumed, DIVIDED, f"--train-iters={LAST}", f"--load={saved}"]
    stock = runs.stock("stock", resumed)
    whole = runs.stock("whole", [*runs.from_seed, DIVIDED, f"--train-iters={LAST}"])
    check_same(stock, whole)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("tp1:4 @3 | tp1:4 @3", []),
        pytest.param("tp2:2,tp2:2 @6", [], marks=pytest.mark.slow),
        pytest.param("tp1:4 @6", ["--bf16"], marks=pytest.mark.slow),
    ],
    ids=["replicas", "pipeline", "one process, bf16"],
)
def test_a_stock_plan_without_the_flag_goes_on_from_a_divided_state(
    layout: str, flags: list[str], tmp_path: Path
) -> None:
    """Stock's ordinary optimizer alone finds no parameter groups in it."""
    runs = Runs(tmp_path, {})
    saved = tmp_path / "saved"
    divided = [*runs.from_seed, *flags, DIVIDED]
    runs.ours("ours", DEEP, [*divided, *saving(saved, SAVED_AT)])
    assert is_stock(plan(layout))
    going_on = [*runs.resumed, *flags, f"--train-iters={LAST}", f"--load={saved}"]
    stock = runs.ours("stock", layout, going_on)
    check_same(stock, runs.ours("divided", layout, [*going_on, DIVIDED]))
    if not flags:
        check_same(stock, runs.ours("whole", DEEP, [*divided, f"--train-iters={LAST}"]))
