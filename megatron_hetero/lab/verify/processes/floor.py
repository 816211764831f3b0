"""A single process with a changed order of summation: the distance of two runs by rounding only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron_hetero.lab.verify.processes.recorder import Recorder
from megatron_hetero.lab.verify.small.shrink import Shrunk
from megatron_hetero.runtime.model.samples.provider import EveryRankProvider


class FloorRecorder(Recorder):
    """Recorder of a run unlike the reference in rounding only.

    It takes each step's micro-batches last to first, which is another order of the sum over them.
    It also starts from weights that are one unit in the last place off, up or down at random, which
    moves the sums inside a micro-batch as another order would (Parker's Monte Carlo arithmetic,
    1997).
    """

    def __init__(self, shrunk: Shrunk) -> None:
        super().__init__()
        self._count = sum(r.num_micro_batches for r in shrunk.plan.replicas)

    def post_wrap_hook(self, model: list[Any]) -> list[Any]:
        """Move the weights before the first forward pass; they are loaded after this hook."""
        (chunk,) = model

        def before_the_first(*_: Any) -> None:
            handle.remove()
            round_anew(chunk)

        handle = chunk.register_forward_pre_hook(before_the_first)
        return super().post_wrap_hook(model)

    def recorded(self, provider: Callable[..., Any]) -> EveryRankProvider:
        from megatron.training import get_args

        recorded = super().recorded(provider)

        def provide(num_samples: Any) -> tuple[Any, ...]:
            train, *others = recorded(num_samples)
            return (_ReversedDataset(train, get_args().micro_batch_size, self._count), *others)

        return EveryRankProvider(provide)


def round_anew(module: torch.nn.Module) -> None:
    """Move every weight to the next number of the type, up or down at random (a fixed seed)."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            # The next number towards plus or minus infinity.
            ends = torch.where(up, torch.inf, -torch.inf).to(parameter)
            parameter.copy_(torch.nextafter(parameter, ends))


class _ReversedDataset:
    def __init__(self, dataset: Any, micro_batch_size: int, count: int) -> None:
        self._dataset, self._size, self._count = dataset, micro_batch_size, count

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        # Index -> micro-batch of the run, and place in it.
        micro_batch, place = divmod(index, self._size)
        step, number = divmod(micro_batch, self._count)
        # Within its step the micro-batch is mirrored.
        other = step * self._count + self._count - 1 - number
        return self._dataset[other * self._size + place]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)
