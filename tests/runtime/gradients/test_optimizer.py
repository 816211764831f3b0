"""Megatron's optimizer over owned pieces: each element once in the job, and plain SGD's weights."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

from megatron_hetero.runtime.gradients.optimizer import DividedOptimizer, build_optimizer
from megatron_hetero.runtime.gradients.sync import GradientSync, set_gradient_sync
from megatron_hetero.runtime.megatron import parallel_state
from tests.runtime.toy_model import ToyRank, in_world, random_gradient, whole_gradients
from tests.runtime.workloads import plan

LAYOUT = "tp2:2,tp1:2 @2 | tp1:4 @3"
ASKED = plan(LAYOUT)
LEARNING_RATE = 0.5
SGD = OptimizerConfig(
    optimizer="sgd", lr=LEARNING_RATE, sgd_momentum=0.0, weight_decay=0.0, clip_grad=0.0
)


def built(toy: ToyRank, weights: list[int]) -> tuple[GradientSync, DividedOptimizer]:
    parallel_state.fill(toy.groups)
    sync = GradientSync([toy.model], toy.groups, toy.plan, weights)
    set_gradient_sync(toy.config, sync)
    make: Any = partial(build_optimizer, get_megatron_optimizer, SGD, [toy.model])
    return sync, make(use_gloo_process_groups=False)


def start(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The weights before the first step."""
    return random_gradient(name, shape, 77, 0, 0, 0)


def test_owners_cover_the_model_once_and_step_as_one_process(tmp_path: Path) -> None:
    """In equal and in unlike shares."""

    def check(rank: int) -> None:
        for weights in ([1, 1, 1, 1], [1, 5, 2, 3]):
            assert_steps_as_one_process(ToyRank(ASKED, rank, False, False, torch.float32), weights)

    in_world(LAYOUT, check, tmp_path)


def assert_steps_as_one_process(toy: ToyRank, weights: list[int]) -> None:
    for name, parameter in toy.parameters.items():
        parameter.data.copy_(toy.part(name, start(name, toy.shards[name].global_shape)))
    sync, optimizer = built(toy, weights)
    owned = torch.tensor(sum(p.tensor.numel() for p in optimizer.pieces if p.is_sole_owner))
    dist.all_reduce(owned)
    assert int(owned) == sum(gradient.numel() for gradient in whole_gradients(ASKED, 1).values())
    expected: dict[str, torch.Tensor] = {}
    for step in (1, 2):
        toy.backward(step, 1.0 / ASKED.replicas[toy.place.replica].num_micro_batches)
        sync.finalize([toy.model])
        optimizer.step()
        toy.model.zero_grad_buffer()
        for name, gradient in whole_gradients(ASKED, step).items():
            before = expected.setdefault(name, start(name, tuple(gradient.shape)))
            expected[name] = before - LEARNING_RATE * gradient / 5
    for name, parameter in toy.parameters.items():
        whole = toy.part(name, expected[name]).float()
        torch.testing.assert_close(parameter.data, whole, rtol=1e-5, atol=1e-5)
    assert sync.weights.are_equal()


def test_pieces_that_are_not_dense_are_copies_written_back(tmp_path: Path) -> None:
    """In fp32; a fused optimizer writes in memory order, so columns of a weight are copied."""

    def check(rank: int) -> None:
        toy = ToyRank(plan("tp2:4 @1 | tp1:4 @1"), rank, False, overlap=False, dtype=torch.float32)
        _, optimizer = built(toy, [1, 1, 1])
        copies = [p for p in optimizer.pieces if p.tensor.data_ptr() != p.view.data_ptr()]
        for piece in optimizer.pieces:
            assert piece.tensor.is_contiguous()
            assert torch.equal(piece.tensor, piece.view)
            piece.tensor.data.fill_(3.0)
            piece.write_weights()
            assert torch.equal(piece.view, torch.full_like(piece.view, 3.0))
            piece.view.fill_(4.0)
            piece.read_weights()
            assert torch.equal(piece.tensor, torch.full_like(piece.view, 4.0))
        # The narrow replica has windows of the row-parallel weights.
        assert all("linear_proj" in p.name or "linear_fc2" in p.name for p in copies)
        assert bool(copies) == (rank == 2)

    in_world("tp2:4 @1 | tp1:4 @1", check, tmp_path)


def test_a_model_without_a_gradient_sync_is_a_mistake_of_order() -> None:
    class Chunk(torch.nn.Module):
        config = object()

    with pytest.raises(RuntimeError, match="synchronise_hook comes first"):
        build_optimizer(get_megatron_optimizer, SGD, [Chunk()])
