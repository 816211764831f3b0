"""What a job writes beside its log: on a plan the same numbers as in one process."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hetero.runtime.gradients.weights import HeldWeights
from megatron_hetero.runtime.job.local.jobs import RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from tests.runtime.flag_effects import EXPERTS
from tests.runtime.flag_runs import one_process_job, plan_and_one, plan_job, read_log
from tests.runtime.test_flag_files import equal

LAYOUT = "tp1:3,tp1:1 @4 | tp2:4 @2"
"""The first replica, whose tensors are whole, writes, and has the last micro-batch."""
FIRST_LAYERS = {"mp_rank_00_000": 0, "mp_rank_00_001": 3, "mp_rank_00": 0}
HASHES = "--check-weight-hash-across-dp-replicas-interval=2"
pytestmark = pytest.mark.slow


def in_the_model(name: str, first_layer: int) -> str:
    return re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) + first_layer}", name)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read the files of a step, with the numbers of layers in the whole model."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.pth")):
        (chunk,) = torch.load(path, weights_only=True).values()
        for name, tensor in chunk.items():
            if isinstance(tensor, torch.Tensor):
                found[in_the_model(name, FIRST_LAYERS[path.stem])] = tensor
    return found


def test_dumps_of_weights_gradients_and_activations(tmp_path: Path) -> None:
    """`--save-params-interval` and its kind, and the hashes of weights."""
    kinds = ("params", "wgrads", "activations")
    flags = [
        "--save=save", "--save-interval=100", HASHES, "--use-distributed-optimizer",
        *(f"--save-{kind}-interval=1" for kind in kinds),
    ]  # fmt: skip
    ours, one = plan_and_one(tmp_path, flags, LAYOUT)
    equal(ours, one, 3)
    assert "Weight hashes match after 2 iterations" in (tmp_path / "plan/rank-0.log").read_text()
    for kind in kinds:
        got, wanted = dumped(tmp_path, kind)
        assert wanted, kind
        steep = {n: t.abs() > 1e-5 for n, t in dumped(tmp_path, "wgrads")[1].items()}
        # The loss works in the place of the logits, which a CPU does not copy.
        wanted.pop("output_layer/output0", None)
        for name, tensor in wanted.items():
            # Adam makes a step of the rounding of a gradient that is zero.
            where = steep[name] if kind == "params" else slice(None)
            torch.testing.assert_close(got[name][where], tensor[where], rtol=1e-4, atol=1e-5)


def dumped(folder: Path, kind: str) -> tuple[dict[str, torch.Tensor], ...]:
    return tuple(
        tensors(folder / name / "save" / kind / "iter_0000001") for name in ("plan", "one")
    )


def test_dumps_of_gradients_of_inputs(tmp_path: Path) -> None:
    """`--save-dgrads-interval`, which Megatron does in half precision alone."""
    flags = ["--save=save", "--save-interval=100", "--save-dgrads-interval=1", "--bf16"]
    plan_and_one(tmp_path, flags, LAYOUT)
    got, wanted = dumped(tmp_path, "dgrads")
    assert any("layers.3" in name for name in wanted)
    for name, tensor in wanted.items():
        distance = (got[name].float() - tensor.float()).norm() / tensor.float().norm()
        # A sum of a few dozen terms that bf16 has rounded.
        assert distance < 0.1, name


def test_a_weight_that_differs_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = HeldWeights.are_equal

    def spoilt(self: HeldWeights) -> bool:
        if torch.distributed.get_rank() == 1:
            next(iter(self._reductions[0].parameters)).data.view(-1)[0] += 1e-3
        return compare(self)

    monkeypatch.setattr(HeldWeights, "are_equal", spoilt)
    job = plan_job(tmp_path / "plan", [HASHES], LAYOUT)
    with pytest.raises(RankFailedError, match="hashes not matching"):
        run_jobs([job], 120)


def test_choices_of_experts_are_traced(tmp_path: Path) -> None:
    """`--moe-routing-trace-path`: every rank writes its own; together they are one process's."""

    def choices(folder: Path) -> Iterator[tuple[Any, ...]]:
        for path in folder.glob("*.jsonl"):
            for line in path.read_text().splitlines():
                record = json.loads(line)
                yield record["step"], json.dumps(record["top_indices"])

    flags = [*EXPERTS, "--moe-routing-trace-path=trace"]
    ours, one = plan_and_one(tmp_path, flags, "tp1:3,tp1:1 @4 | tp1:4 @2")
    equal(ours, one, 3)
    found, wanted = (sorted(choices(tmp_path / name / "trace")) for name in ("plan", "one"))
    assert len(wanted) == 3 * 6 * 4
    assert found == wanted


def test_a_checkpoint_that_does_not_stay_is_read(tmp_path: Path) -> None:
    """`--non-persistent-ckpt-type global`: the newest of two kinds of checkpoints goes on."""
    flags = [
        "--train-iters=4", "--save=save", "--load=save", "--save-interval=100",
        "--non-persistent-ckpt-type=global", "--non-persistent-save-interval=2",
        "--non-persistent-global-ckpt-dir=passing",
    ]  # fmt: skip
    first = plan_and_one(tmp_path, [*flags, "--exit-interval=3"])
    equal(*first, 3)
    for name in ("plan", "one"):
        # As a job that died after step 3: what it saved at its end is not there.
        shutil.rmtree(tmp_path / name / "save")
        assert (tmp_path / name / "passing" / "iter_0000002").is_dir()
    second = plan_and_one(tmp_path, flags)
    equal(*second, 2)
    assert second[0].losses[0] == pytest.approx(first[0].losses[2], rel=3e-6)


def test_a_checkpoint_is_written_anew(tmp_path: Path) -> None:
    """`--ckpt-convert-format torch_dist`: read under one plan, written by another, and left."""
    flags = ["--train-iters=5", "--save-interval=100"]
    first = plan_job(tmp_path / "first", [*flags, "--exit-interval=3", "--save=save"])
    run_jobs([first], 120)
    start = f"--load={tmp_path / 'first' / 'save'}"
    convert = ["--ckpt-convert-format=torch_dist", "--ckpt-convert-save=copy"]
    copying = plan_job(tmp_path / "copying", [*flags, start, *convert], "tp1:2,tp2:2 @6")
    run_jobs([copying], 120)
    assert read_log(copying).losses == []
    copied = f"--load={tmp_path / 'copying' / 'copy' / 'torch_dist'}"
    jobs = [one_process_job(tmp_path / n, [*flags, f]) for n, f in (("a", start), ("b", copied))]
    run_jobs(jobs, 120)
    ours, wanted = (read_log(job) for job in (jobs[1], jobs[0]))
    assert len(ours.losses) == 2
    assert (ours.losses, ours.norms) == (wanted.losses, wanted.norms)
