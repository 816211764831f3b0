"""Record of one rank: losses, gradients, norms, weights and sample numbers of every step.

`recorder` writes it: a safetensors file, which is written and read at once, and a JSON file beside
it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy
from safetensors.numpy import load_file

from megatron_hetero.lab.verify.processes.routing import Flips
from megatron_hetero.runtime.parallel.shards import ParameterShard
from megatron_hetero.runtime.parallel.traffic import BoundaryTraffic, RankTraffic

DRAWN = "drawn/"
"""Begins the names of the weights that the model was built with, in the file."""
STOCK_DRAWN = "stock-drawn/"
"""Begins the names of the weights that Megatron's own initialisation drew, in the file."""
SKIPPED = "skipped"
"""Replaces the norm of a step with overflowed gradients, in which no rank updated."""


@dataclass(frozen=True)
class RankRecord:
    """A record, read back: shards by name, and arrays by `kind/step/name`.

    Kinds are gradient and weight. Steps are Megatron's iterations, from 1 or, in a resumed run,
    from the next one on; weights of the step before the first are the initial ones. `losses` has
    entries on last stages only; `samples` are the dataset indices that this rank read, in order.
    """

    arrays: dict[str, numpy.ndarray]
    shards: dict[str, ParameterShard]
    losses: dict[int, float]
    norms: dict[int, str]
    samples: list[int]
    traffic: RankTraffic | None = None
    """Bytes handed to the transport by the gradient sync; None under stock Megatron."""
    random_state: str = ""
    """Digest of the state that dropout outside tensor-parallel regions draws from, at the end."""
    region_state: str = ""
    """Digest of the state that dropout in tensor-parallel regions draws from, at the end."""
    boundaries: dict[int, BoundaryTraffic] = field(default_factory=dict)
    """Traffic to other stages, by boundary; empty under stock Megatron."""
    loss_scales: dict[int, float] = field(default_factory=dict)
    """Factor of each step's loss (fp16); gradients are recorded without it."""

    drawn: dict[str, numpy.ndarray] = field(default_factory=dict)
    """The weights that the model was built with, by name, before a checkpoint took their place."""
    stock_drawn: dict[str, numpy.ndarray] = field(default_factory=dict)
    """The weights that Megatron's own initialisation drew, by name (of the one process alone)."""
    flips: Flips | None = None
    """Tokens for which the routers would have chosen experts unlike the replayed ones."""
    rounded: dict[str, str] = field(default_factory=dict)
    """Types of weights recorded from the model, for want of main weights on this rank, where the
    one process records main weights (stages in unlike precisions)."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps that were logged, in order."""
        return tuple(sorted(self.norms))

    @property
    def skipped(self) -> tuple[int, ...]:
        """Return the steps that moved no weight, because a gradient was infinite or NaN."""
        return tuple(step for step in self.steps if self.norms[step] == SKIPPED)


def joined(before: RankRecord, after: RankRecord) -> RankRecord:
    """Join the records of a rank and of the one that has resumed its training.

    The weights that the second has loaded take the place of those that the first has saved.
    """
    return replace(
        before,
        arrays={**before.arrays, **after.arrays},
        losses={**before.losses, **after.losses},
        norms={**before.norms, **after.norms},
        samples=[*before.samples, *after.samples],
        loss_scales={**before.loss_scales, **after.loss_scales},
        random_state=after.random_state,
        region_state=after.region_state,
        rounded={**before.rounded, **after.rounded},
    )


def read_record(path: Path) -> RankRecord:
    """Read what `Recorder.save` wrote at `path`."""
    meta = json.loads(path.with_suffix(".json").read_text())
    arrays = load_file(path.with_suffix(".safetensors"))
    drawn = {key: arrays.pop(key) for key in list(arrays) if key.startswith(DRAWN)}
    stock_drawn = {key: arrays.pop(key) for key in list(arrays) if key.startswith(STOCK_DRAWN)}
    return RankRecord(
        arrays=arrays,
        drawn={key.removeprefix(DRAWN): array for key, array in drawn.items()},
        stock_drawn={key.removeprefix(STOCK_DRAWN): array for key, array in stock_drawn.items()},
        shards={entry["name"]: ParameterShard.from_json(entry) for entry in meta["shards"]},
        losses={int(step): value for step, value in meta["losses"].items()},
        norms={int(step): value for step, value in meta["norms"].items()},
        samples=meta["samples"],
        loss_scales={int(step): value for step, value in meta["loss_scales"].items()},
        random_state=meta["random_state"],
        region_state=meta["region_state"],
        rounded=meta["rounded"],
        flips=None if meta["flips"] is None else Flips(**meta["flips"]),
        traffic=None if meta["traffic"] is None else RankTraffic(**meta["traffic"]),
        boundaries={int(n): BoundaryTraffic(**b) for n, b in meta["boundaries"].items()},
    )
