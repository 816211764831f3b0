"""Micro-batches of unlike sequence lengths (`variable_seq_lengths`), from a script of one's own."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hetero.lab.kit.orders import with_interleaving
from megatron_hetero.lab.verify.distance.compare import compare, tolerances
from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.processes.recorder import DrawingRecorder, Recorder
from megatron_hetero.lab.verify.run import data_ranks, records, tensor_groups
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.local.jobs import LocalJob
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.job.steps import StockJob, World, job_of
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.model import gpt
from tests.runtime.workloads import plan, workload

UNIT = 12
"""Every length is a multiple, which all widths of these plans divide."""
_lengths: list[int] = []


def forward_step(data_iterator: Any, model: Any) -> tuple[torch.Tensor, Any]:
    """A script's own: each micro-batch is as long as a word of its first sample says."""
    from megatron.core.utils import get_attr_wrapped_model

    batch = gpt._batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    names = ("tokens", "labels", "loss_mask", "position_ids")
    tokens, labels, loss_mask, position_ids = map(batch.get, names)
    first = tokens[0, 5] if tokens is not None else None
    first = labels[0, 4] if labels is not None else first
    if first is not None:
        length = UNIT * (1 + int(first) % 4)
        _lengths.append(length)
        cut = (tokens, labels, loss_mask, position_ids)
        tokens, labels, loss_mask, position_ids = (
            None if t is None else t[:, :length].contiguous() for t in cut
        )
    # Megatron's local attention makes the causal mask of each length itself.
    output = model(tokens, position_ids, None, labels=labels, loss_mask=loss_mask)
    return output, partial(gpt.loss_func, loss_mask)


def train(job: Any, recorder: Recorder) -> None:
    """Train as a pre-training script does; Megatron has no flag for this, a script sets it."""
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    args = job.parse(parse_and_validate_args, args_defaults={})
    args.variable_seq_lengths = True
    model = job.configure(gpt_config_from_args, args)
    assert model.transformer.variable_seq_lengths
    config = pretrain_cfg_container_from_args(args, model)
    recorder.observe_log()
    model.post_wrap_hooks.append(recorder.post_wrap_hook)
    provider = recorder.recorded(gpt.datasets_provider)
    job.pretrain(pretrain, config, provider, ModelType.encoder_or_decoder, forward_step)


CHUNKS = [(0, 1), (1, 1), (0, 1), (1, 1)]
CASES: dict[str, Any] = {
    "unlike depth": (plan("tp2:3,tp1:1 @4 | tp1:4 @2"), {"per_token_loss": True}),
    "three widths": (plan("tp1:1,tp3:2,tp2:1 @6"), {"sequence_parallel": True}),
    "interleaved": (
        with_interleaving(plan("tp2:2,tp1:2 @4 | tp1:4 @2"), 0, CHUNKS),
        {"per_token_loss": True, "tied_embeddings": False},
    ),
}


@pytest.mark.parametrize(
    "name", ["unlike depth", "three widths", pytest.param("interleaved", marks=pytest.mark.slow)]
)
def test_unlike_lengths_train_as_in_one_process(name: str, tmp_path: Path) -> None:
    asked, changes = CASES[name]
    shrunk = shrink(asked, workload(**changes))
    sizes = {"--seq-length": 48, "--max-position-embeddings": 48}
    kept = [a for a in shrunk.model_args if a.partition("=")[0] not in sizes]
    longer = tuple(f"{flag}={size}" for flag, size in sizes.items())
    evaluated = ("--split=80,20,0", "--eval-iters=1", "--eval-interval=2")
    shrunk = replace(
        shrunk,
        model=replace(shrunk.model, seq_length=48, max_position_embeddings=48),
        model_args=(*kept, *longer, *evaluated),
    )
    jobs = VerifyJobs(shrunk, Options(steps=4), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    on_the_plan = jobs._plan_job("the plan", "adam", shrunk, jobs.training_arguments("adam"))
    alone = jobs.reference_job("adam")
    # Megatron asks for this dispatcher wherever lengths vary, of dense models too.
    common = (*jobs.training_arguments("adam"), "--moe-token-dispatcher-type=alltoall")

    def plan_rank(rank: int) -> None:
        save_without_a_server()
        recorder = Recorder()
        plan_file = on_the_plan.directory / "plan.json"
        from megatron_hetero.plan.layout import format_layout

        flag = f"--hetero-layout={format_layout(asked.layout)}"
        if plan_file.exists():
            flag = f"--hetero-plan={plan_file}"
        cache = f"--data-cache-path={on_the_plan.directory / 'cache'}"
        train(job_of([*common, flag, cache]), recorder)
        recorder.save(on_the_plan.directory / f"record-{rank}")

    def one_process(rank: int) -> None:
        recorder = DrawingRecorder()
        backend.activate_cpu_backend()
        argv = (
            *common,
            f"--make-vocab-size-divisible-by={shrunk.vocab_multiple}",
            f"--data-cache-path={alone.directory / 'cache'}",
            *backend.CPU_FLAGS,
        )
        train(StockJob(argv, World.from_environment()), recorder)
        recorder.save(alone.directory / f"record-{rank}")
        assert len(set(_lengths)) > 2, _lengths

    planned = LocalJob("plan", on_the_plan.num_ranks, plan_rank, on_the_plan.directory)
    run_jobs([planned, LocalJob("one", 1, one_process, alone.directory)], 120)
    (reference,) = records(alone)
    ranks = records(planned)
    distances = compare(
        reference,
        ranks,
        data_ranks(asked),
        shrunk.model,
        "adam",
        tensor_groups=tensor_groups(asked),
    )
    assert distances.within(tolerances(shrunk.model, "adam")), distances
    last = (planned.directory / f"rank-{planned.num_ranks - 1}.log").read_text()
    one = (alone.directory / "rank-0.log").read_text()
    assert _validation_losses(last) == pytest.approx(_validation_losses(one), rel=1e-6)


def _validation_losses(log: str) -> list[float]:
    found = [float(x) for x in re.findall(r"validation loss at .*? lm loss value: (\S+)", log)]
    assert len(found) >= 2
    return found
