"""Checkpoints: written under one plan, read under another or by stock Megatron, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest

from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.runs import plan_of, train, whole_weights
from tests.runtime.workloads import LLAMA_LIKE, MIXTRAL_LIKE, plan, workload

FIRST = "tp2:3,tp1:1 @4 | tp1:4 @2"
SECOND = "tp1:1,tp2:3 @3 | tp2:2,tp1:2 @3"
UNEVEN = "tp3(2:1:1):3,tp2(3:1):1 @4 | tp1:4 @2"
OVER = "tp2ep2etp2:2,tp1:2 @3 | tp2ep2etp2:2,tp2:2 @3"
SAVED_AT, LAST = 1, 2
INTERLEAVED = with_interleaving(plan("tp2:2,tp1:2 @4 | tp1:4 @2"), 0, [(0, 1), (1, 1)] * 2)


@pytest.mark.parametrize(
    ("first", "second", "changes"),
    [
        pytest.param(FIRST, SECOND, {}, marks=pytest.mark.slow),
        pytest.param(FIRST, UNEVEN, LLAMA_LIKE, marks=pytest.mark.slow),
        pytest.param(UNEVEN, SECOND, LLAMA_LIKE, marks=pytest.mark.slow),
        # A generated plan of the default tests with chunks goes on under another one.
        pytest.param(INTERLEAVED, SECOND, {}, marks=pytest.mark.slow),
        pytest.param(FIRST, INTERLEAVED, {}, marks=pytest.mark.slow),
        (FIRST, UNEVEN, MIXTRAL_LIKE),
        pytest.param(FIRST, OVER, MIXTRAL_LIKE, marks=pytest.mark.slow),
    ],
    ids=[
        *("tied", "to uneven shares", "from uneven shares", "from chunks", "to chunks"),
        *("experts", "experts over replicas"),
    ],
)
def test_a_run_goes_on_under_another_plan(
    first: str | Plan, second: str | Plan, changes: dict[str, object], tmp_path: Path
) -> None:
    """Weights and Adam's moments survive first plan -> second plan -> stock Megatron."""
    # One model that all three divide, and one padded vocabulary.
    common = shrink(plan(UNEVEN), workload(per_token_loss=True, **changes))
    jobs = VerifyJobs(replace(common, plan=plan(UNEVEN)), Options(steps=LAST), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    from_seed = [a for a in jobs.training_arguments("adam") if not a.startswith("--train-iters")]
    base = [a for a in from_seed if not a.startswith(("--load", "--finetune", "--no-load-optim"))]
    folder = tmp_path / "checkpoints"

    def vocabulary(asked: str | Plan) -> str:
        widths = plan_of(asked).layout.tensor_parallel_widths
        return f"--make-vocab-size-divisible-by={common.vocab_multiple // lcm(*widths)}"

    def saving_every_step(asked: str | Plan) -> list[str]:
        return [vocabulary(asked), f"--save={folder}", "--save-interval=1"]

    whole = train(
        tmp_path / "whole", first, [*from_seed, vocabulary(first), f"--train-iters={LAST + 1}"]
    )
    before = train(
        tmp_path / "before",
        first,
        [*from_seed, *saving_every_step(first), f"--train-iters={SAVED_AT}"],
    )
    after = train(
        tmp_path / "after",
        second,
        [*base, *saving_every_step(second), f"--train-iters={LAST}", f"--load={folder}"],
    )
    one = [f"--make-vocab-size-divisible-by={common.vocab_multiple}", *backend.CPU_FLAGS]
    stock = train(
        tmp_path / "stock", None, [*base, *one, f"--train-iters={LAST + 1}", f"--load={folder}"]
    )

    assert set(after[0].norms) == {SAVED_AT + 1, LAST}
    assert set(stock[0].norms) == {LAST + 1}
    assert whole_weights(after, SAVED_AT) == whole_weights(before, SAVED_AT)
    assert whole_weights(stock, LAST) == whole_weights(after, LAST)
    for run, step in ((after, SAVED_AT + 1), (after, LAST), (stock, LAST + 1)):
        assert _loss(run, step) == pytest.approx(_loss(whole, step), rel=1e-6)
        assert _norm(run, step) == pytest.approx(_norm(whole, step), rel=2e-6)


@pytest.mark.parametrize(
    ("layout", "changes", "flags"),
    [
        pytest.param(UNEVEN, LLAMA_LIKE, [], marks=pytest.mark.slow),
        (UNEVEN, LLAMA_LIKE, ["--use-distributed-optimizer"]),
        pytest.param(FIRST, {}, ["--use-distributed-optimizer"], marks=pytest.mark.slow),
        pytest.param(OVER, MIXTRAL_LIKE, ["--use-distributed-optimizer"], marks=pytest.mark.slow),
    ],
    ids=["uneven", "uneven, divided", "divided", "experts over replicas"],
)
def test_a_stock_checkpoint_goes_on_under_a_plan(
    layout: str, changes: dict[str, object], flags: list[str], tmp_path: Path
) -> None:
    """Stock Megatron stacks the layers of a GPT in one tensor, of weights and of Adam's moments."""
    common = shrink(plan(UNEVEN), workload(per_token_loss=True, **changes))
    jobs = VerifyJobs(replace(common, plan=plan(FIRST)), Options(steps=LAST), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    from_seed = [a for a in jobs.training_arguments("adam") if not a.startswith("--train-iters")]
    start = ("--load=", "--finetune", "--no-load-optim")
    saved = tmp_path / "saved"
    one = [f"--make-vocab-size-divisible-by={common.vocab_multiple}", *backend.CPU_FLAGS]
    stock = train(
        tmp_path / "stock",
        None,
        [*from_seed, *one, f"--train-iters={LAST}", f"--save={saved}", "--save-interval=1"],
    )
    (saved / "latest_checkpointed_iteration.txt").write_text(str(SAVED_AT))
    widths = plan(layout).layout.tensor_parallel_widths
    ours = train(
        tmp_path / "ours",
        layout,
        [
            *(a for a in from_seed if not a.startswith(start)),
            *flags,
            f"--make-vocab-size-divisible-by={common.vocab_multiple // lcm(*widths)}",
            f"--train-iters={LAST}",
            f"--load={saved}",
        ],
    )
    assert whole_weights(ours, SAVED_AT) == whole_weights(stock, SAVED_AT)
    for step in (SAVED_AT + 1, LAST):
        assert _loss(ours, step) == pytest.approx(_loss(stock, step), rel=1e-6)
        assert _norm(ours, step) == pytest.approx(_norm(stock, step), rel=2e-6)


def _loss(ranks: Sequence[RankRecord], step: int) -> float:
    return next(record.losses[step] for record in ranks if step in record.losses)


def _norm(ranks: Sequence[RankRecord], step: int) -> float:
    return float.fromhex(ranks[0].norms[step])
