"""New weights on the way from the owners, waited for at the first use in a step.

With `--overlap-param-gather` the gathers of all buckets start right after the optimizer's step, in
the order in which the forward pass reaches them; each is waited for before the first module that
uses one of its weights. Megatron starts the next gather inside that wait. Here all have started
before any rank waits: ranks of unlike depth reach their buckets in unlike order, and a rank that
computed before it started a gather could be the one that another rank waits for.

Code that reads weights elsewhere (a checkpoint, a record) calls `finish` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch


class ParameterGather:
    """Gathers of one rank's model chunks.

    Args:
        buckets: (its parameters on this rank, a function that starts its gather and returns the
            function that waits), in an order that is the same on every rank.
    """

    def __init__(
        self,
        model: Sequence[torch.nn.Module],
        buckets: Sequence[tuple[Iterable[Any], Callable[[], Callable[[], None]]]],
    ) -> None:
        self.starts = [start for _, start in buckets]
        self._under_way: dict[int, Callable[[], None]] = {}
        # Parameter -> its buckets; a parameter that is cut has several.
        self._buckets_of: dict[Any, list[int]] = {}
        for number, (parameters, _) in enumerate(buckets):
            for parameter in parameters:
                self._buckets_of.setdefault(parameter, []).append(number)
        for chunk in model:
            for module in chunk.modules():
                # A module waits for its own parameters; its children wait for theirs.
                own = list(module.parameters(recurse=False))
                if any(parameter in self._buckets_of for parameter in own):
                    module.register_forward_pre_hook(self._wait_for(own))

    @property
    def num_under_way(self) -> int:
        """Count the buckets whose weights have not all arrived."""
        return len(self._under_way)

    def start(self) -> None:
        """Start all gathers; no weight of a bucket may be used before its gather has ended."""
        # An earlier gather must not write weights behind a newer one.
        self.finish()
        for number, start in enumerate(self.starts):
            self._under_way[number] = start()

    def finish(self) -> None:
        """Wait for all gathers that are under way."""
        self._finish(list(self._under_way))

    def _finish(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            wait = self._under_way.pop(number, None)
            if wait is not None:
                wait()

    def _wait_for(self, parameters: Sequence[Any]) -> Callable[..., None]:
        numbers = sorted({n for p in parameters for n in self._buckets_of.get(p, ())})

        def before_forward(module: torch.nn.Module, inputs: Any) -> None:
            if self._under_way:
                self._finish(numbers)

        return before_forward
