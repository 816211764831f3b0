"""Providers of datasets, in Megatron's form of call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True)
class EveryRankProvider:
    """Provider that Megatron calls on all ranks, not only on the first of a tensor-parallel group.

    `provide(num_samples)` returns substitutes for (train, valid, test).
    """

    provide: Callable[..., tuple[Any, ...]]
    is_distributed: ClassVar[bool] = True

    def __call__(self, num_samples: Any, vp_stage: int | None = None) -> tuple[Any, ...]:
        """Provide the data sets, the same ones for each model chunk."""
        return self.provide(num_samples)
