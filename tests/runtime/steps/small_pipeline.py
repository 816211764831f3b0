"""A pipeline of small products in fp64, whose gradients one process computes too."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig

from megatron_hetero.plan.plan import Plan
from megatron_hetero.plan.ranks import rank_table
from megatron_hetero.runtime.gradients.weight_gradients import put_off
from megatron_hetero.runtime.parallel.building import build_groups
from megatron_hetero.runtime.parallel.groups import RankGroups
from megatron_hetero.runtime.parallel.pipeline import PipelineCommunicator

TOKENS, HIDDEN = 3, 4


def random(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def sample(k: int) -> torch.Tensor:
    """The tokens of a micro-batch."""
    return random(1000 + k, TOKENS, 1, HIDDEN)


class Product(torch.autograd.Function):
    """x @ w, whose gradient of w may be put off."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.nn.Parameter) -> torch.Tensor:
        ctx.saved = x.detach(), w
        return x @ w

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        due = _Due(*ctx.saved, gradient)
        if not put_off(due):
            due.make()
        return gradient @ ctx.saved[1].T, None


class _Due:
    def __init__(self, x: torch.Tensor, w: Any, gradient: torch.Tensor) -> None:
        self._x, self._w, self._gradient = x, w, gradient

    def make(self) -> None:
        self._w.main_grad += (self._x.flatten(0, 1).T @ self._gradient.flatten(0, 1)).detach()


class Stage(torch.nn.Module):
    """A model chunk in Megatron's terms: tanh(x w); the first one reads its micro-batches."""

    def __init__(self, number: int, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight: Any = torch.nn.Parameter(random(number, HIDDEN, HIDDEN))
        self.weight.main_grad = torch.zeros(HIDDEN, HIDDEN, dtype=torch.float64)
        self._input: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[torch.Tensor | None]) -> None:
        (self._input,) = tensors

    def forward(self, data: Any) -> torch.Tensor:
        x = self._input if self._input is not None else next(data).requires_grad_()
        made: torch.Tensor = torch.tanh(Product.apply(x, self.weight))
        return made


def forward_step(data: Any, chunk: Any) -> Any:
    """Megatron's forward step: the sum of squares, three tokens each."""

    def loss(output: torch.Tensor) -> Any:
        found = output.square().sum()
        return found, torch.tensor(TOKENS, dtype=torch.int), {"loss": found.detach().clone()}

    return chunk(data), loss


def in_one_process(num_stages: int, num_micro_batches: int) -> list[Stage]:
    """The stages with their gradients of a whole step."""
    stages = [Stage(s, None) for s in range(num_stages)]
    for k in range(num_micro_batches):
        x = sample(k).requires_grad_()
        for stage in stages:
            stage.set_input_tensor([x])
            x = stage(None)
        x.square().sum().backward()
    return stages


def losses(num_stages: int, num_micro_batches: int) -> list[float]:
    """Of each micro-batch."""
    found = []
    for k in range(num_micro_batches):
        x = sample(k)
        for s in range(num_stages):
            x = torch.tanh(x @ random(s, HIDDEN, HIDDEN))
        found.append(float(x.square().sum()))
    return found


class SmallRank:
    """One rank of a plan of one replica whose stages are products.  Construction is collective."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.stage = rank_table(plan)[rank].stage
        self.groups: RankGroups = build_groups(plan, timedelta(minutes=1))
        self.config: Any = TransformerConfig(
            num_layers=1,
            hidden_size=HIDDEN,
            num_attention_heads=1,
            pipeline_dtype=torch.float64,
            deallocate_pipeline_outputs=True,
        )
        self.config.calculate_per_token_loss = True
        self.model = Stage(self.stage, self.config)
        self.communicator = PipelineCommunicator(self.groups, self.config, False)

    def step(self, executor: Any, num_micro_batches: int, **named: Any) -> list[Any]:
        """Run one step with the arguments of Megatron's loop."""
        return executor.run(  # type: ignore[no-any-return]
            forward_step_func=forward_step,
            data_iterator=iter([sample(k) for k in range(num_micro_batches)]),
            model=[self.model],
            seq_length=TOKENS,
            micro_batch_size=1,
            p2p_communicator=self.communicator,
            pg_collection=self.groups.collection(),
            **named,
        )
