"""Checkpoints from plan A to plan B and back: every tensor of weights and optimizer, bit for bit.

Each run loads and saves again without a step in between, so that the files can be compared whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_hetero.lab.verify.options import Options
from megatron_hetero.lab.verify.processes.jobs import VerifyJobs
from megatron_hetero.lab.verify.small.shrink import shrink
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job import entry
from megatron_hetero.runtime.job.local.jobs import LocalJob, RankFailedError
from megatron_hetero.runtime.job.local.launch import run_jobs
from megatron_hetero.runtime.megatron.checkpoint_queue import save_without_a_server
from megatron_hetero.runtime.state.random_states import PREFIX
from tests.runtime.runs import checkpoint_tensors
from tests.runtime.workloads import LLAMA_LIKE, MIXTRAL_LIKE, plan, workload

DIVIDED = "--use-distributed-optimizer"
STOCK = "optimizer.state.param."
FORM = "--dist-ckpt-optim-fully-reshardable"
DEEP = "tp2:3,tp1:1 @4 | tp1:4 @2"
WIDE = "tp1:1,tp2:3 @3 | tp2:2,tp1:2 @3"
UNEVEN = "tp3(2:1:1):3,tp2(3:1):1 @4 | tp1:4 @2"
CONTEXT = "tp1cp2:3,tp2:1 @4 | tp1:2,tp1cp2:2 @2"
DEALT = "tp3ep3(2:1:1):3,tp2(3:1)ep2(3:1):1 @4 | tp1:4 @2"
OVER = "tp2ep2etp2:2,tp1:2 @3 | tp2ep2etp2:2,tp2:2 @3"
OVER_CONTEXT = "tp1cp2ep4:2,tp1:2 @3 | tp1cp2ep4:2,tp2:2 @3"
SHARDED = "tp2:2z2,tp1:2z1 @3 | tp1:2z2,tp2(1:3):2z1 @3"
THREE = "tp2:4 @2 | tp1:1,tp1:3 @2 | tp1:4 @2"


@dataclass(frozen=True)
class Pair:
    """Saved under `first`, loaded and saved under `second`, and back; flags of each side."""

    first: str
    second: str
    first_flags: tuple[str, ...] = ()
    second_flags: tuple[str, ...] = ()
    common_flags: tuple[str, ...] = ()
    model: Mapping[str, Any] = field(default_factory=lambda: LLAMA_LIKE)


_FP16 = ("--fp16", "--initial-loss-scale=16")

PAIRS = {
    "divided to divided, bf16": Pair(UNEVEN, DEEP, (DIVIDED,), (DIVIDED,), ("--bf16",)),
    "sharded layers to whole ones, bf16": Pair(SHARDED, WIDE, (DIVIDED,), (), ("--bf16",)),
}
MORE_PAIRS = {
    "divided to whole": Pair(DEEP, WIDE, (DIVIDED,), ()),
    "experts, divided to whole": Pair(UNEVEN, DEEP, (DIVIDED,), (), model=MIXTRAL_LIKE),
    "experts dealt out, to divided ones": Pair(DEALT, DEEP, (DIVIDED,), (), model=MIXTRAL_LIKE),
    "experts divided, to ones dealt out": Pair(
        UNEVEN, "tp2ep2:2,tp1:2 @4 | tp2ep2(1:3):4 @2", (), (DIVIDED,), model=MIXTRAL_LIKE
    ),
    "experts over replicas, to divided ones": Pair(OVER, DEEP, (DIVIDED,), (), model=MIXTRAL_LIKE),
    "experts over replicas, to ones dealt out inside": Pair(
        OVER, DEALT, (), (DIVIDED,), model=MIXTRAL_LIKE
    ),
    "experts over replicas and divided sequences": Pair(
        OVER, OVER_CONTEXT, (DIVIDED,), (DIVIDED,), model=MIXTRAL_LIKE
    ),
    "whole to whole": Pair(DEEP, UNEVEN),
    "whole to divided": Pair(WIDE, UNEVEN, (), (DIVIDED,)),
    "bf16, divided to whole": Pair(WIDE, DEEP, (DIVIDED,), (), ("--bf16",)),
    "fp16, divided to whole": Pair(WIDE, UNEVEN, (DIVIDED,), (), _FP16),
    "context parallel": Pair(CONTEXT, UNEVEN, (DIVIDED,), ()),
    "more replicas": Pair(DEEP, THREE, (DIVIDED,), (DIVIDED,)),
    "three to uneven": Pair(THREE, UNEVEN, (DIVIDED,), ()),
    "stock's form, bf16": Pair(UNEVEN, DEEP, (DIVIDED, FORM), (DIVIDED, FORM), ("--bf16",)),
    "one replica": Pair("tp2:1,tp1:3 @6", DEEP, (DIVIDED,), (DIVIDED,)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_there_and_back_bit_for_bit(name: str, tmp_path: Path) -> None:
    _there_and_back(PAIRS[name], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_PAIRS)
def test_more_pairs_there_and_back(name: str, tmp_path: Path) -> None:
    _there_and_back(MORE_PAIRS[name], tmp_path)


def test_state_of_megatrons_own_distributed_optimizer_is_refused(tmp_path: Path) -> None:
    """The weights can be had; the state of its default form is in the order of its buffers."""
    shrunk = shrink(plan(DEEP), workload())
    jobs = VerifyJobs(shrunk, Options(steps=2), tmp_path)
    run_jobs([jobs.seed_job()], 120)
    from_seed = jobs.training_arguments("adam")
    saved = tmp_path / "stock" / "saved"

    def train_stock(rank: int) -> None:
        save_without_a_server()
        backend.activate_cpu_backend()
        multiple = f"--make-vocab-size-divisible-by={shrunk.vocab_multiple}"
        saving = (f"--save={saved}", "--save-interval=1000", DIVIDED, multiple)
        argv = (*from_seed, *saving, f"--data-cache-path={tmp_path}", *backend.CPU_FLAGS)
        entry.train_stock(argv, entry.World.from_environment())

    run_jobs([LocalJob("stock", 1, train_stock, tmp_path / "stock")], 120)
    resumed = [a for a in from_seed if not a.startswith(("--load", "--finetune", "--no-load-opt"))]
    argv = [*resumed, DIVIDED, f"--load={saved}"]
    with pytest.raises(RankFailedError, match=r"status 4(.|\n)*reshardable(.|\n)*--no-load-optim"):
        _run(tmp_path / "refused", DEEP, argv)
    # A plan of stock's own reads it with the flag alone.
    whole = [*resumed, f"--load={saved}"]
    with pytest.raises(RankFailedError, match=r"status 4(.|\n)*reshardable(.|\n)*--no-load-optim"):
        _run(tmp_path / "refused by stock", "tp1:4 @6", whole)
    _run(tmp_path / "weights", DEEP, [*argv, "--no-load-optim"])


def _there_and_back(pair: Pair, folder: Path) -> None:
    # One model that both divide, and one padded vocabulary.
    changes = dict(pair.model, per_token_loss=True, tied_embeddings=True)
    common = shrink(plan(UNEVEN), workload(**changes))
    jobs = VerifyJobs(replace(common, plan=plan(UNEVEN)), Options(steps=2), folder)
    run_jobs([jobs.seed_job()], 120)
    from_seed = jobs.training_arguments("adam")
    resumed = [a for a in from_seed if not a.startswith(("--load", "--finetune", "--no-load-opt"))]

    def run(name: str, layout: str, argv: Sequence[str]) -> dict[str, torch.Tensor]:
        multiple = common.vocab_multiple // lcm(*plan(layout).layout.tensor_parallel_widths)
        _run(
            folder / name,
            layout,
            [
                *argv,
                *pair.common_flags,
                f"--make-vocab-size-divisible-by={multiple}",
                f"--save={folder / name / 'saved'}",
                # Saved at the end alone.
                "--save-interval=1000",
            ],
        )
        return checkpoint_tensors(folder / name / "saved" / "iter_0000002")

    first = run("first", pair.first, [*from_seed, *pair.first_flags])
    second = run(
        "second",
        pair.second,
        [*resumed, *pair.second_flags, f"--load={folder / 'first' / 'saved'}"],
    )
    back = run(
        "back", pair.first, [*resumed, *pair.first_flags, f"--load={folder / 'second' / 'saved'}"]
    )
    first, second, back = [_of_the_model(tensors) for tensors in (first, second, back)]
    states = [key for key in first if key.startswith("optimizer.state.exp_avg.")]
    weights = [key for key in first if not key.startswith("optimizer.")]
    assert len(states) == len(weights) > 10
    assert all(first[key].abs().max() > 0 for key in states)
    for other in (second, back):
        assert set(other) == set(first)
        different = [key for key in first if not torch.equal(first[key], other[key])]
        assert not different


def _of_the_model(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the entries without the random states, which are a plan's, and with main weights as an
    ordinary optimizer has them: under another key, and in fp32 not at all."""
    found = {}
    for key, value in tensors.items():
        name = key.removeprefix(STOCK)
        if name == key:
            found |= {} if key.startswith(PREFIX) else {key: value}
        elif tensors[name].dtype == torch.float32:
            assert torch.equal(value, tensors[name])
        else:
            found[f"optimizer.state.fp32_param.{name}"] = value
    return found


def _run(folder: Path, layout: str, argv: Sequence[str]) -> None:
    command = [
        *argv,
        f"--data-cache-path={folder / 'cache'}",
        "--override-opt-param-scheduler",
        f"--hetero-layout={layout}",
    ]

    def train(rank: int) -> None:
        save_without_a_server()
        entry.main(command)

    run_jobs([LocalJob(folder.name, plan(layout).layout.num_devices, train, folder)], 120)
