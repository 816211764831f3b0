"""Flags that say which samples a job reads: a plan reads those of one process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_hetero.lab.verify.small.text import write_text_dataset
from megatron_hetero.runtime.job.local.jobs import RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_runs import one_process_job, plan_and_one, plan_job, read_log
from tests.runtime.test_flag_files import LOSS, TEXT, equal

VALIDATION = r"validation loss at iteration \d+ .* lm loss value: (\S+)"


def test_validation_has_a_batch_of_its_own(tmp_path: Path) -> None:
    """Twice the training batch, and steps that are left out between: all replicas go on alike."""
    flags = ["--train-iters=4", "--eval-iters=1", "--eval-interval=2", "--iterations-to-skip", "3"]
    ours, one = plan_and_one(tmp_path / "twelve", [*flags, "--eval-global-batch-size=12"])
    equal(ours, one, 3)
    assert len(ours.numbers(VALIDATION)) >= 2
    assert ours.numbers(VALIDATION) == pytest.approx(one.numbers(VALIDATION), rel=LOSS)


@pytest.mark.slow
def test_a_larger_batch_is_another_validation(tmp_path: Path) -> None:
    flags = ["--train-iters=2", "--eval-iters=1", "--eval-interval=2"]
    found = [
        plan_and_one(tmp_path / str(size), [*flags, f"--eval-global-batch-size={size}"])[0]
        for size in (6, 18)
    ]
    small, large = (log.numbers(VALIDATION) for log in found)
    assert small and large and small != large


@pytest.mark.slow
def test_counted_sequences_are_taken_from_the_file(tmp_path: Path) -> None:
    """`--per-dataset-sequences-path`: the index of a data set is not asked how long it is."""
    name = str(tmp_path / "text")
    write_text_dataset(Path(name), 6000)
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    index = IndexedDataset(name).index
    counts = tmp_path / "counts.json"
    counts.write_text(json.dumps({name: [index.sequence_count, index.document_count]}))
    data = [f"--data-path={name}", "--split=90,10,0"]
    flags = [*TEXT, f"--per-dataset-sequences-path={counts}"]
    ours, one = plan_and_one(tmp_path / "counted", flags, data=data)
    equal(ours, one, 4)
    counts.write_text("[1, 2]")
    job = plan_job(tmp_path / "broken", flags, data=data)
    with pytest.raises(RankFailedError, match="must be an object by data set"):
        run_jobs([job], 120)


@pytest.mark.slow
def test_documents_do_not_see_each_other_on_any_stage(tmp_path: Path) -> None:
    """`--reset-attention-mask` on a pipeline with an inner stage, to which no batch came before."""
    name = str(tmp_path / "text")
    write_text_dataset(Path(name), 6000)
    data = [f"--data-path={name}", "--split=100,0,0"]
    flags = [
        "--vocab-size=257", "--train-iters=4", "--null-tokenizer-eod-id=32",
        "--init-method-std=0.3",
    ]  # fmt: skip
    layout = "tp1:1,tp2:2,tp1:1 @4 | tp1:4 @2"
    ours, one = plan_and_one(
        tmp_path / "mask", [*flags, "--reset-attention-mask"], layout=layout, data=data
    )
    equal(ours, one, 4)
    job = one_process_job(tmp_path / "without", flags, layout=layout, data=data)
    run_jobs([job], 120)
    assert read_log(job).losses != pytest.approx(one.losses, rel=100 * LOSS)
