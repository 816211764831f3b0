"""Verdicts of the checks: what is allowed, and what was found, in words and as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_hetero.lab.kit.forecast import Forecast
from megatron_hetero.lab.kit.race import TEXT, race
from megatron_hetero.lab.kit.small_job import Machine
from megatron_hetero.lab.verify.small.text import tokenizer_arguments
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.layout import parse_layout

MEMORY_TOLERANCE = 0.03
"""Part of the prediction by which held memory may exceed the prediction: rounding of the allocator,
scalars."""
STEP_FACTOR, SHARED_STEP_FACTOR = 1.25, 3.0
"""Largest factor between measured and predicted step on a GPU, and on the cores of a CPU, shared
with further programs."""
RATIO_LIMIT, SHARED_RATIO_LIMIT = 1.05, 1.5
"""Most that the lower end of the interval of the own runtime over stock Megatron may be."""
RACE_LIMIT_S = 240.0
"""Seconds of a race; one takes 30."""


@dataclass(frozen=True)
class Found:
    """Verdict of a check, in words and as data; `is_tried` is false where this machine cannot make
    the check."""

    ok: bool
    what: str
    data: dict[str, Any]
    is_tried: bool = True


def equality_verdict(data: dict[str, Any]) -> Found:
    """Return the verdict: the worst of loss, gradients, norm and weights against its tolerance."""
    keys = ("loss", "gradients", "gradient_norm", "weights")
    worst = max(keys, key=lambda key: data[key] / data["tolerance"][key])
    what = (
        f"{worst.replace('_', ' ')} differ by {data[worst]:.1e}, {data['tolerance'][worst]:.1e} "
        "allowed"
    )
    if data["unequal_initial_weights"]:
        what += f"; unequal initial weights of {data['unequal_initial_weights']}"
    if data["unequal_holders"]:
        what += f"; ranks hold one weight in unlike bits: {data['unequal_holders']}"
    # JSON has no numbers for a diverged run: they become null.
    distances = {key: data[key] if math.isfinite(data[key]) else None for key in keys}
    return Found(data["ok"], what, {"distances": distances})


def judged(found: Forecast, machine: Machine, is_planted: bool) -> Found:
    """Say whether memory and step are as predicted; planted: nine tenths of the memory are."""
    predicted = found.predicted_bytes * (0.9 if is_planted else 1.0)
    over = found.held_bytes / predicted - 1
    ratio = found.step_s / found.predicted_step_s
    factor = STEP_FACTOR if machine.num_gpus else SHARED_STEP_FACTOR
    # Memory may stay below its prediction; a step may be neither much longer nor much shorter.
    fits, is_timely = over <= MEMORY_TOLERANCE, 1 / factor <= ratio <= factor
    memory = f"{found.held_bytes / 2**20:.1f} MiB held, {over:+.1%} beside the prediction"
    if not fits:
        memory += f" (too little is predicted: more than {MEMORY_TOLERANCE:.0%})"
    step = (
        f"a step of {found.step_s * 1e3:.1f} ms, {ratio:.2f} of the prediction ({1 / factor:.2f} "
        f"to {factor:.2f} allowed)"
    )
    if found.attention is not None:
        step += f"; {found.attention} attention"
    data = {
        "attention": found.attention,
        "predicted_bytes": round(predicted),
        "held_bytes": found.held_bytes,
        "predicted_step_s": found.predicted_step_s,
        "step_s": found.step_s,
        "parts_bytes": {name: list(pair) for name, pair in found.parts.items()},
    }
    return Found(fits and is_timely, f"{memory}; {step}", data)


def raced(machine: Machine, folder: Path, named: str) -> Found:
    """Return the verdict of a race with stock Megatron: the lower end of the interval of the ratio
    against the limit.

    Args:
        machine: the GPUs of the machine, or none.
        folder: for the files of the race.
        named: the layers that are trained.
    """
    # The tokenizer of the text sets the vocabulary, so the model's own flag goes.
    flags = [flag for flag in machine.model(named) if not flag.startswith("--vocab-size")]
    more = (
        *tokenizer_arguments(folder / TEXT),
        "--lr=3e-4",
        "--lr-decay-style=constant",
        "--optimizer=adam",
        "--log-interval=1",
        "--eval-iters=0",
        "--eval-interval=1000000",
        "--num-workers=0",
    )
    # Four micro-batches on one rank: a plan that stock Megatron runs as well.
    plan = plan_from_layout(parse_layout("tp1:4 @4"))
    pairs = 40 if machine.num_gpus else 12
    found = race(
        plan, (*flags, *more), (), pairs, folder, forced=True, limit_s=RACE_LIMIT_S
    )
    # The race fails only where the whole interval lies above the limit.
    low, high = found.interval
    limit = RATIO_LIMIT if machine.num_gpus else SHARED_RATIO_LIMIT
    what = f"step times {found.ratio:.3f} ({low:.3f} to {high:.3f}), at most {limit:.2f} allowed"
    return Found(low <= limit, what, {"ratio": found.ratio, "interval": [low, high]})
