"""Checkpoints: written under one plan, read under another or by stock Megatron, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest

from megatron_hetero.runtime import backend, entry
from megatron_hetero.runtime.local_launch import Job, run_jobs
from megatron_hetero.runtime.verify.jobs import Options, VerifyJobs, save_without_a_server
from megatron_hetero.runtime.verify.record import RankRecord, Recorder, read_record
from megatron_hetero.runtime.verify.shrink import shrink
from tests.runtime.workloads import LLAMA_LIKE, plan, workload

FIRST = "tp2:3,tp1:1 @4 | tp1:4 @2"
SECOND = "tp1:1,tp2:3 @3 | tp2:2,tp1:2 @3"
SAVED_AT, LAST = 2, 4


@pytest.mark.parametrize("changes", [{}, LLAMA_LIKE], ids=["tied", "gated"])
def test_a_run_goes_on_under_another_plan(changes: dict[str, object], tmp_path: Path) -> None:
    """Weights and Adam's moments survive first plan -> second plan -> stock Megatron."""
    shrunk = shrink(plan(FIRST), workload(per_token_loss=True, **changes))
    jobs = VerifyJobs(shrunk, Options(steps=LAST), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    from_seed = [a for a in jobs.training_arguments("adam") if not a.startswith("--train-iters")]
    base = [a for a in from_seed if not a.startswith(("--load", "--finetune", "--no-load-optim"))]
    folder = tmp_path / "checkpoints"
    one = [f"--make-vocab-size-divisible-by={shrunk.vocab_multiple}", *backend.CPU_FLAGS]

    whole = _train(tmp_path / "whole", FIRST, [*from_seed, f"--train-iters={LAST}"])
    first = _train(
        tmp_path / "first",
        FIRST,
        [*from_seed, f"--train-iters={SAVED_AT}", f"--save={folder}", "--save-interval=2"],
    )
    second = _train(
        tmp_path / "second",
        SECOND,
        [
            *base,
            f"--train-iters={LAST}",
            f"--load={folder}",
            f"--save={folder}",
            "--save-interval=2",
        ],
    )
    stock = _train(
        tmp_path / "stock", None, [*base, *one, f"--train-iters={LAST + 1}", f"--load={folder}"]
    )

    assert set(second[0].norms) == {SAVED_AT + 1, LAST}
    assert _whole_weights(second, 0) == _whole_weights(first, SAVED_AT)
    assert _whole_weights(stock, 0) == _whole_weights(second, LAST)
    for step in (SAVED_AT + 1, LAST):
        assert _loss(second, step) == pytest.approx(_loss(whole, step), rel=1e-6)
        assert float.fromhex(second[0].norms[step]) == pytest.approx(
            float.fromhex(whole[0].norms[step]), rel=2e-6
        )
    assert _loss(stock, LAST + 1) > 0


def _train(folder: Path, layout: str | None, argv: Sequence[str]) -> list[RankRecord]:
    """Train `layout` with our entry, or one process of stock Megatron if there is none."""
    num_ranks = 1 if layout is None else plan(layout).layout.num_devices
    common = [*argv, f"--data-cache-path={folder / 'cache'}", "--override-opt-param-scheduler"]

    def train(rank: int) -> None:
        save_without_a_server()
        recorder = Recorder()
        if layout is None:
            backend.activate_cpu_backend()
            entry.train_stock(common, entry.World.from_environment(), recorder)
        else:
            entry.main([*common, f"--hetero-layout={layout}"], recorder)
        recorder.save(folder / f"record-{rank}")

    run_jobs([Job(folder.name, num_ranks, train, folder)], 120)
    return [read_record(folder / f"record-{rank}") for rank in range(num_ranks)]


def _whole_weights(ranks: Sequence[RankRecord], step: int) -> dict[str, bytes]:
    """The model's weights, put together from the shards of all ranks, which must agree."""
    whole: dict[str, numpy.ndarray] = {}
    for record in ranks:
        for name, shard in record.shards.items():
            tensor = whole.setdefault(name, numpy.full(shard.global_shape, numpy.nan, "float32"))
            offset = 0
            for start, stop in shard.intervals:
                place = (slice(None),) * shard.dim + (slice(start, stop),)
                local = (slice(None),) * shard.dim + (slice(offset, offset + stop - start),)
                part = record.arrays[f"weight/{step}/{name}"][local]
                known = ~numpy.isnan(tensor[place])
                assert numpy.array_equal(tensor[place][known], part[known])
                tensor[place] = part
                offset += stop - start
    assert not any(numpy.isnan(tensor).any() for tensor in whole.values())
    return {name: tensor.tobytes() for name, tensor in sorted(whole.items())}


def _loss(ranks: Sequence[RankRecord], step: int) -> float:
    return next(record.losses[step] for record in ranks if step in record.losses)
