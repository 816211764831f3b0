"""Bundles of equal replicas, and bundles as columns of a programme."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_hetero.hashed import hashed_once, value
from megatron_hetero.planner.columns.packing import Floats
from megatron_hetero.planner.columns.pricing import BundleShape
from megatron_hetero.planner.completion.filled import Filled


@hashed_once
@value(frozen=True)
class Bundle:
    """A shape with its layers and quick times."""

    shape: BundleShape
    filled: Filled

    def micro_batches(self, step_s: float) -> float:
        """Return how many it does in a step, as a real number; zero where none comes through."""
        # The first micro-batch takes the fill, each further one a period, in every replica.
        after_first_s = step_s - self.filled.fill_s
        done = self.shape.num_replicas * (1 + after_first_s / self.filled.period_s)
        return 0.0 if after_first_s < 0 else done

    @property
    def node_layers(self) -> Iterator[tuple[int, int]]:
        """Return (kind, layers held by one node) for each block."""
        start = 0
        for block in self.shape.blocks:
            end = start + len(block.widths)
            yield block.kind, sum(self.filled.layers[start:end])
            start = end


Mix = tuple[tuple[Bundle, int], ...]
"""Bundles, and how many of each."""


@dataclass(frozen=True, eq=False)
class BundleColumns:
    """Bundles as columns of a programme: `rows` are the nodes that they take, [kind, bundle]."""

    bundles: tuple[Bundle, ...]
    num_replicas: Floats
    fill_s: Floats
    period_s: Floats
    rows: Floats

    def micro_batches(self, step_s: float) -> Floats:
        """Return how many each does in a step, as real numbers; zero where none comes through."""
        after_first_s = step_s - self.fill_s
        done = self.num_replicas * (1 + after_first_s / self.period_s)
        return np.where(after_first_s < 0, 0.0, done)
