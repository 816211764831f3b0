"""One optimizer over replicas in bf16 and in fp32: main weights with equal bits on all holders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_hetero.runtime.gradients.main_weights import (
    FullPrecisionOptimizer,
    build_mixed_optimizer,
)
from megatron_hetero.runtime.gradients.memory import main_weight
from megatron_hetero.runtime.gradients.sync import GradientSync, set_gradient_sync
from megatron_hetero.runtime.megatron import parallel_state
from tests.runtime.toy_model import ToyRank, in_world, random_gradient
from tests.runtime.workloads import plan

LAYOUT = "tp1:4 @2 | tp1:4 @2"
PRECISIONS = ("bf16", "fp32")
ADAM = OptimizerConfig(
    optimizer="adam", lr=1e-2, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0
)


@pytest.mark.parametrize("divides", [False, True], ids=["whole", "divided"])
def test_holders_in_unlike_precisions_move_alike(divides: bool, tmp_path: Path) -> None:
    """The weights in fp32 are the main weights, and those in bf16 are these, rounded."""

    def check(rank: int) -> None:
        dtype = (torch.bfloat16, torch.float32)[rank]
        toy = ToyRank(plan(LAYOUT), rank, False, overlap=False, dtype=dtype)
        toy.config.params_dtype = dtype
        parallel_state.fill(toy.groups)
        for name, parameter in toy.parameters.items():
            whole = random_gradient(name, toy.shards[name].global_shape, 5, rank, 0, 0)
            parameter.data.copy_(whole)
        sync = GradientSync(
            [toy.model], toy.groups, toy.plan, [1, 2] if divides else None, precisions=PRECISIONS
        )
        set_gradient_sync(toy.config, sync)
        optimizer = build_mixed_optimizer(
            get_megatron_optimizer,
            ADAM,
            [toy.model],
            divides=divides,
            use_gloo_process_groups=False,
        )
        is_full = isinstance(optimizer.chained_optimizers[0], FullPrecisionOptimizer)
        assert is_full == (dtype == torch.float32)
        before = {name: p.detach().clone() for name, p in toy.parameters.items()}
        for step in (1, 2):
            for name, parameter in toy.parameters.items():
                # Of two micro-batches, in whole numbers, which bf16 has too.
                gradient = random_gradient(name, tuple(parameter.shape), step, rank, 0, 0)
                parameter.main_grad.copy_((4 * gradient).round())
            sync.finalize([toy.model])
            success, norm, _ = optimizer.step()
            assert success and norm > 1
            toy.model.zero_grad_buffer()
        for name, parameter in sorted(toy.parameters.items()):
            assert not torch.equal(parameter.data, before[name])
            found = [torch.empty(parameter.shape), torch.empty(parameter.shape)]
            dist.all_gather(found, parameter.data.float())
            in_bf16, in_fp32 = found
            assert torch.equal(in_bf16, in_fp32.bfloat16().float())
            if not divides:
                main = [torch.empty(parameter.shape), torch.empty(parameter.shape)]
                dist.all_gather(main, main_weight(parameter).float())
                assert torch.equal(main[0], main[1])

    in_world(LAYOUT, check, tmp_path)


def test_a_model_without_a_gradient_sync_is_a_mistake_of_order() -> None:
    class Chunk(torch.nn.Module):
        config = object()

    with pytest.raises(RuntimeError, match="synchronise_hook comes first"):
        build_mixed_optimizer(get_megatron_optimizer, ADAM, [Chunk()], divides=False)
