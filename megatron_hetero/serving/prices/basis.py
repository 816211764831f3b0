"""What the price of steps on a GPU type rests on, in words."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.serving.prices.engine import Engine
from megatron_hetero.serving.prices.kernels import card_speed, table_of
from megatron_hetero.serving.prices.measured import StepPhase


@dataclass(frozen=True)
class PriceBasis:
    """Sources of the prices of a GPU type in groups of a width, in words."""

    gpu: str
    width: int
    prefill: str
    decode: str


def price_basis(gpu: GpuType, width: int, engine: Engine) -> PriceBasis:
    """Say what the prices of a GPU type rest on."""
    phases: tuple[StepPhase, ...] = ("prefill", "decode")
    prefill, decode = (_words(gpu, width, engine, phase) for phase in phases)
    return PriceBasis(gpu.name, width, prefill, decode)


def _words(gpu: GpuType, width: int, engine: Engine, phase: StepPhase) -> str:
    steps = engine.profile.measured(gpu.name, width, phase) if engine.profile else ()
    if steps:
        first = steps[0]
        # A width that was not measured is in the scale of the nearest one.
        at = "" if first.width == width else f" at tp{first.width}"
        number = "1 step" if len(steps) == 1 else f"{len(steps)} steps"
        return f"{number} measured{at} ({first.engine} {first.version})"
    table = table_of(gpu.name, engine.name)
    if table == gpu.name:
        return "table of kernels"
    words = "data sheet, at the median card's part of it"
    if table is not None:
        words = f"table of kernels of {table}"
    # Decode reads memory, which watts hardly slow.
    return f"{words}, as far as its watts go" if phase == "prefill" and _is_held(gpu) else words


def _is_held(gpu: GpuType) -> bool:
    """Return whether the watts of its board slow a card's products."""
    precision = "fp16" if gpu.peak_flops["bf16"] is None else "bf16"
    speed = card_speed(gpu, precision).products
    return speed.flops_per_s < (gpu.peak_flops[precision] or 0.0)
