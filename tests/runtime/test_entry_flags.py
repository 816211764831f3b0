"""Flags that would do something wrong in silence, and what differs between ranks by design."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_hetero.errors import HeteroError, UnsupportedError
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import world
from megatron_hetero.runtime.job.rank_arguments import rank_arguments
from tests.runtime.test_refusals import LAYOUT, MODEL, refuse
from tests.runtime.workloads import plan


@pytest.fixture(autouse=True)
def _world_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--ckpt-format=torch"], "--ckpt-format"),
        (["--use-mp-args-from-checkpoint-args"], "--use-mp-args-from-checkpoint-args"),
    ],
)
def test_flags_that_replicas_would_follow_in_unlike_ways(flags: list[str], name: str) -> None:
    message = refuse([*MODEL, f"--hetero-layout={LAYOUT}", *flags], UnsupportedError)
    assert "not supported on an asymmetric plan" in message and name in message


@pytest.mark.parametrize(
    "plan_flags",
    [["--global-batch-size=8"], [f"--hetero-layout={LAYOUT}"]],
    ids=["stock", "plan"],
)
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--context-parallel-size=2"], "--context-parallel-size"),
        (["--sft", "--reset-attention-mask"], "--sft with --reset-attention-mask"),
    ],
)
def test_flags_that_the_pre_training_script_would_follow(
    flags: list[str], name: str, plan_flags: list[str]
) -> None:
    """The loop would accept them, and train on batches that were not made for them."""
    message = refuse([*MODEL, *plan_flags, *flags], HeteroError)
    assert name in message


def test_only_the_last_rank_writes_for_tensorboard() -> None:
    """Megatron opens its writers while it parses, when each replica still has a last rank."""
    asked = plan(LAYOUT)
    given = ("--tensorboard-dir=folder", "--wandb-project=name")
    *others, last = [rank_arguments(asked, place, given) for place in rank_table(asked)]
    assert "--tensorboard-dir=" not in last and "--wandb-project=" not in last
    for argv in others:
        assert argv.index("--tensorboard-dir=") > argv.index("--tensorboard-dir=folder")
        assert argv.index("--wandb-project=") > argv.index("--wandb-project=name")


def test_each_process_takes_its_own_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before the process group exists; Megatron does not where it finds one."""
    calls: list[tuple[str, object]] = []
    monkeypatch.setattr(backend, "cuda_is_usable", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda n: calls.append(("device", n)))
    monkeypatch.setattr(
        world.dist, "init_process_group", lambda **given: calls.append(("group", given["timeout"]))
    )
    args = SimpleNamespace(local_rank=3, distributed_backend="nccl")
    world.join(world.World(5, 8, str(tmp_path / "store")), args, timedelta(minutes=7))
    assert calls == [("device", 3), ("group", timedelta(minutes=7))]
