"""Weight gradients that are put off: the bits of one backward pass, one micro-batch after the
other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers

from megatron_hetero.runtime.gradients import weight_gradients
from megatron_hetero.runtime.gradients.weight_gradients import WeightGradients, put_off
from tests.runtime.toy_model import in_world

NUM_MICRO_BATCHES = 3
TOKENS, HIDDEN, COLUMNS = 4, 5, 6


class Recorded:
    """Work that notes when it is made."""

    def __init__(self, name: str, made: list[str]) -> None:
        self.name, self._made = name, made

    def make(self) -> None:
        self._made.append(self.name)


def test_work_is_made_in_the_order_of_the_backward_pass_that_put_it_off() -> None:
    made: list[str] = []
    due = WeightGradients()
    assert not put_off(Recorded("nobody asks", made))
    for micro_batch in range(2):
        with due.putting_off(0, micro_batch):
            for layer in "ba":
                assert put_off(Recorded(f"{layer}{micro_batch}", made))
    assert not put_off(Recorded("no longer", made))
    assert made == []
    due.make(0, 1)
    due.make(0, 0)
    assert made == ["b1", "a1", "b0", "a0"]


def passes(
    weight: torch.nn.Parameter, bias: torch.nn.Parameter, rank: int, due: WeightGradients | None
) -> list[torch.Tensor]:
    """Forward and backward passes of a column-parallel layer; input gradients."""
    linear: Any = layers.linear_with_grad_accumulation_and_async_allreduce
    found = []
    for k in range(NUM_MICRO_BATCHES):
        generator = torch.Generator().manual_seed(10 * k + rank)
        x = torch.randn(TOKENS, 1, HIDDEN, generator=generator, requires_grad=True)
        y = linear(x, weight, bias, False, False, True, tp_group=dist.group.WORLD)
        slope = torch.randn(y.shape, generator=generator)
        if due is None:
            y.backward(slope)
        else:
            before = weight.main_grad.clone()  # type: ignore[attr-defined]
            with due.putting_off(0, k):
                y.backward(slope)
            assert weight.grad is None
            assert torch.equal(weight.main_grad, before)  # type: ignore[attr-defined]
        assert x.grad is not None
        found.append(x.grad)
    return found


def test_two_parts_give_the_bits_of_one_backward_pass(tmp_path: Path) -> None:
    """Under sequence parallelism on two ranks: the input is gathered again for the second part."""

    def check(rank: int) -> None:
        weights, biases = [], []
        for _ in range(2):
            generator = torch.Generator().manual_seed(100 + rank)
            weights.append(torch.nn.Parameter(torch.randn(COLUMNS, HIDDEN, generator=generator)))
            biases.append(torch.nn.Parameter(torch.randn(COLUMNS, generator=generator)))
        parallel_state._set_global_memory_buffer()  # of gathered inputs, as Megatron has it
        whole = passes(weights[0], biases[0], rank, None)
        weight_gradients.activate()
        weights[1].main_grad = torch.zeros(COLUMNS, HIDDEN)  # type: ignore[attr-defined]
        due = WeightGradients()
        parts = passes(weights[1], biases[1], rank, due)
        assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
        for k in range(NUM_MICRO_BATCHES):
            due.make(0, k)
        assert weights[0].grad is not None
        assert torch.equal(weights[1].main_grad, weights[0].grad)  # type: ignore[attr-defined]
        assert torch.equal(biases[1].grad, biases[0].grad)  # type: ignore[arg-type]

    in_world("tp2:1 @1", check, tmp_path)
