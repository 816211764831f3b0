"""Stages of one plan in bf16, fp16 and fp32: equal to one process that casts where they do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hetero.errors import UnsupportedError
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.record import RankRecord, read_record
from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.lab.verify.run import outcome_to_data, verify
from megatron_hetero.lab.verify.small.job_flags import without_flags
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.plan.file import save_plan
from megatron_hetero.plan.plan import Host, Plan
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.batches import with_micro_batch_sizes
from megatron_hetero.runtime.gradients.memory import main_grad
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.checks.support import check_plan
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from tests.runtime.runs import checkpoint_tensors
from tests.runtime.workloads import LLAMA_LIKE, plan, workload

Table = Sequence[Sequence[str | None]]
LAYOUT = "tp1:2,tp1:2 @4 | tp1:4 @2"


def mixed(layout: str, precisions: Table) -> Plan:
    """A plan whose stages have precisions of their own, [replica][stage]."""
    asked = plan(layout)
    replicas = tuple(
        replace(
            replica,
            stages=tuple(
                replace(stage, precision=own)  # type: ignore[arg-type]
                for stage, own in zip(replica.stages, row, strict=True)
            ),
        )
        for replica, row in zip(asked.replicas, precisions, strict=True)
    )
    return replace(asked, replicas=replicas)


STRICT = {
    "a pipeline": ("tp1:2,tp1:2 @4", [["bf16", "fp32"]], "sgd", {}),
    "replicas": ("tp1:4 @2 | tp1:4 @2", [["bf16"], ["fp32"]], "sgd", {}),
    "three precisions, tied embeddings": (
        LAYOUT,
        [["bf16", "fp32"], ["fp16"]],
        "sgd",
        {"per_token_loss": True},
    ),
    "the optimizer divided": (
        LAYOUT,
        [[None, "fp16"], ["fp32"]],
        "adam",
        {**LLAMA_LIKE, "per_token_loss": True, "use_distributed_optimizer": True},
    ),
    "fp32 stages of several GPUs, recompute": (
        "tp1:1,tp2:2,tp1:1 @4",
        [["fp16", "fp32", "bf16"]],
        "adam",
        {"recompute": "full", "sequence_parallel": True},
    ),
}
_FAST = ("three precisions, tied embeddings", "the optimizer divided")


@pytest.mark.parametrize(
    "name",
    [name if name in _FAST else pytest.param(name, marks=pytest.mark.slow) for name in STRICT],
)
def test_a_plan_is_one_process_with_the_same_casts(name: str, tmp_path: Path) -> None:
    layout, precisions, optimizer, changes = STRICT[name]
    options = Options(steps=2, precision="bf16", optimizers=(optimizer,))
    outcome = verify(mixed(layout, precisions), workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)
    (reference,), ranks = _records(tmp_path / optimizer, outcome.shrunk.plan)
    # Before any weight has moved, nothing but the order of fp32 sums is left.
    for record in ranks:
        if 1 in record.losses:
            assert record.losses[1] == pytest.approx(reference.losses[1], rel=3e-7)
        norms = [float.fromhex(r.norms[1]) for r in (record, reference)]
        assert norms[0] == pytest.approx(norms[1], rel=2e-6)


@pytest.mark.slow
def test_divided_stages_in_half_precision_round_no_worse_than_one_process(tmp_path: Path) -> None:
    options = Options(steps=3, precision="bf16", optimizers=("adam",))
    asked = mixed("tp2:3,tp1:1 @4 | tp1:4 @2", [["bf16", "fp32"], ["fp16"]])
    changes = {"per_token_loss": True, "use_distributed_optimizer": True}
    outcome = verify(asked, workload(**changes), options, tmp_path)
    assert outcome.ok, outcome_to_data(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["boundary-slice-dropped", "slice-not-reduced", "sample-moved"])
def test_planted_errors_are_found(fault: str, tmp_path: Path) -> None:
    options = Options(steps=3, precision="bf16", optimizers=("sgd",), fault=fault)
    asked = mixed(LAYOUT, [["bf16", "fp32"], ["fp16"]])
    assert not verify(asked, workload(per_token_loss=True), options, tmp_path).ok


@pytest.mark.parametrize("flags", [("--use-distributed-optimizer",)])
def test_an_overflow_in_one_stage_makes_all_skip(flags: tuple[str, ...], tmp_path: Path) -> None:
    asked = mixed(LAYOUT, [["bf16", "fp16"], ["fp32"]])
    jobs = _jobs(asked, 3, tmp_path, flags, "--initial-loss-scale=16")
    run_jobs([jobs.seed_job()], 120)
    ranks = _train(jobs, asked, tmp_path / "planted", flags, overflows_on=1)
    for record in ranks:
        assert record.skipped == (2,)
        assert record.loss_scales == {1: 16.0, 2: 16.0, 3: 8.0}
        assert record.norms == ranks[0].norms


@pytest.mark.parametrize("divides", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_checkpoints_are_as_of_any_plan(divides: bool, tmp_path: Path) -> None:
    """Main weights go bit for bit to another table of precisions and to stock Megatron in bf16."""
    flags = ("--use-distributed-optimizer",) if divides else ()
    first = mixed(LAYOUT, [["fp32", "bf16"], ["fp16"]])
    second = mixed("tp1:1,tp1:3 @6", [["fp16", "fp32"]])
    jobs = _jobs(first, 3, tmp_path, flags)
    run_jobs([jobs.seed_job()], 120)
    saved = tmp_path / "checkpoints"
    _train(jobs, first, tmp_path / "before", (*flags, f"--save={saved}", "--save-interval=3"))
    # What a plan in the job's own precision writes: the model in it, and main weights in fp32.
    model, main = _model_and_main_weights(saved / "iter_0000003")
    assert {t.dtype for t in model.values()} == {torch.bfloat16}
    assert main.keys() == model.keys()
    assert any((main[k] != model[k].float()).any() for k in main)
    going_on = (
        "--no-load-rng",
        f"--load={saved}",
        "--train-iters=4",
        "--override-opt-param-scheduler",
    )
    for record in [
        *_train(jobs, second, tmp_path / "after", (*flags, *going_on)),
        *_train(jobs, None, tmp_path / "stock", going_on),
    ]:
        for key, weight in main.items():
            name = _parameter(key)
            if name in record.shards:
                # Where the optimizer is divided, a rank may have its own rounding alone.
                dtype = record.rounded.get(name, "torch.float32").removeprefix("torch.")
                due = weight.to(getattr(torch, dtype)).float().numpy()
                assert (record.arrays[f"weight/3/{name}"] == due).all(), name


def test_flags_that_do_not_go_with_it_are_refused(tmp_path: Path) -> None:
    asked = mixed(LAYOUT, [["bf16", "fp16"], ["fp32"]])
    jobs = _jobs(asked, 3, tmp_path, ())
    with pytest.raises(RankFailedError, match="--grad-reduce-in-bf16: leave it out"):
        _train(jobs, asked, tmp_path / "refused", ("--grad-reduce-in-bf16",))


def test_stages_on_gpus_without_the_precision_are_refused() -> None:
    asked = mixed("tp1:2,tp1:2 @6", [["bf16", "bf16"]])
    host = Host("a", "a", None, (0, 1), ("A100-40GB", "V100-32GB"))
    stages = tuple(
        replace(stage, devices=(f"a:{index}",))
        for index, stage in enumerate(asked.replicas[0].stages)
    )
    replicas = (replace(asked.replicas[0], stages=stages),)
    with pytest.raises(UnsupportedError) as caught:
        check_plan(with_micro_batch_sizes(replace(asked, replicas=replicas, hosts=(host,)), 1))
    assert "replica 0, stage 1: bf16 on V100-32GB" in str(caught.value)
    assert "stage 0" not in str(caught.value)


def _model_and_main_weights(
    checkpoint: Path,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    tensors = checkpoint_tensors(checkpoint)
    # Of the distributed optimizer, and of Megatron's optimizer with main weights.
    names = "optimizer.state.param.", "optimizer.state.fp32_param."
    main = {k.removeprefix(n): t for k, t in tensors.items() for n in names if k.startswith(n)}
    return {k: t for k, t in tensors.items() if k in main}, main


def _parameter(key: str) -> str:
    """The parameter of a checkpoint's key; those of norms are as Transformer Engine has them."""
    key = key.replace(".self_attention.linear_qkv.layer_norm_", ".input_layernorm.")
    return key.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")


def _records(folder: Path, asked: Plan) -> tuple[list[RankRecord], list[RankRecord]]:
    count = asked.layout.num_devices
    ranks = [read_record(folder / "plan" / f"record-{rank}") for rank in range(count)]
    return [read_record(folder / "reference" / "record-0")], ranks


def _jobs(asked: Plan, steps: int, folder: Path, flags: tuple[str, ...], *more: str) -> VerifyJobs:
    shrunk = shrink(asked, workload(per_token_loss=True))
    shrunk = replace(shrunk, model_args=(*shrunk.model_args, *more))
    return VerifyJobs(shrunk, Options(steps=steps, precision="bf16", plan_flags=flags), folder)


def _train(
    jobs: VerifyJobs,
    asked: Plan | None,
    folder: Path,
    flags: tuple[str, ...],
    overflows_on: int | None = None,
) -> list[RankRecord]:
    """Train a plan, or one process of stock Megatron, from the seed or from `--load` of `flags`."""
    given = jobs.training_arguments("adam")
    if any(flag.startswith("--load=") for flag in flags):
        given = without_flags(given, ("--load", "--finetune", "--no-load-optim", "--no-load-rng"))
    argv = [*given, *flags, f"--data-cache-path={folder / 'cache'}"]
    if asked is not None:
        folder.mkdir(parents=True)
        save_plan(asked, folder / "plan.json")
        argv.append(f"--hetero-plan={folder / 'plan.json'}")

    def run(rank: int) -> None:
        save_without_a_server()
        recorder = _Overflow(rank == overflows_on, at_step=2)
        if asked is None:
            backend.activate_cpu_backend()
            entry.train_stock([*argv, *backend.CPU_FLAGS], entry.World.from_environment(), recorder)
        else:
            entry.main(argv, recorder)
        recorder.save(folder / f"record-{rank}")

    num_ranks = 1 if asked is None else asked.layout.num_devices
    run_jobs([LocalJob(folder.name, num_ranks, run, folder)], 120)
    return [read_record(folder / f"record-{rank}") for rank in range(num_ranks)]


class _Overflow(Recorder):
    """Recorder of main weights; where a fault `is_planted` one gradient of one step is infinite."""

    def __init__(self, is_planted: bool, at_step: int) -> None:
        super().__init__(records_main=True)
        self._is_planted, self._at_step = is_planted, at_step

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        from megatron.core.utils import get_model_config
        from megatron.training import get_args

        config = get_model_config(model[0])
        inner: Any = config.finalize_model_grads_func

        def finalize(*args: Any, **kwargs: Any) -> None:
            if self._is_planted and get_args().curr_iteration + 1 == self._at_step:
                main_grad(next(model[0].parameters())).view(-1)[0] = float("inf")
            inner(*args, **kwargs)

        if self._is_planted:
            config.finalize_model_grads_func = finalize
        return super().post_wrap_hook(model)
