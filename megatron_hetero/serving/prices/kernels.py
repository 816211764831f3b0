"""What kernels of inference reach on a GPU type under an engine, by measured tables.

A kernel computes and moves data.  The shorter of both is hidden by the longer one but for a part,
and a call has a fixed cost.  Attention of prompts has two things more: heads of few channels reach
less of the peak, and a call lasts as long as a block of 128 queries, which one multiprocessor works
on alone.  Products and attention of decode have ratios beside, by their sizes (`sizes.py`).
Constants and ratios are fitted to AIConfigurator's tables of single kernels, for each engine and
card: `kernels.json` names the source, `tools/make_serving_kernels.py` makes the file and says how
far off tables are that were left out.  A card without a table takes the median of the others' parts
of the sheet, without ratios.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.errors import ProfileError
from megatron_hetero.files import read_json, validate_document
from megatron_hetero.serving.prices.sizes import SizeGrid, SizeRatios
from megatron_hetero.serving.prices.watts import part_kept_up

_DEFAULT = "default"
_USUAL_SIZE = 128
_BLOCK_QUERIES = 128
_TWIN = {
    "A100-40GB": "A100-80GB", "A100-80GB-PCIe": "A100-80GB", "A800-80GB": "A100-80GB",
    "H800-80GB": "H100-80GB", "H100-NVL": "H100-80GB", "H100-PCIe": "H100-80GB",
    "GH200-96GB": "H200", "L40": "L40S", "RTX-6000-Ada": "L40S", "L4": "L40S",
    "RTX-PRO-6000": "RTX-PRO-6000-Server", "RTX-PRO-6000-Max-Q": "RTX-PRO-6000-Server",
}  # fmt: skip
"""Types of the same chip or generation, for which equal fractions of the data sheet are assumed."""


class KernelCurve(BaseModel):
    """Constants of a kind of kernel on a card under an engine.

    `peak` and `bandwidth`: parts of the sheet that large calls reach.  `exposed`: part of the
    shorter of computing and moving that the longer one does not hide.  `block`: seconds over what
    128 queries of a head take at the card's peak.  `size_power`: the peak's part grows as this
    power of a head's channels.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    peak: float
    bandwidth: float
    fixed_s: float
    exposed: float
    block: float = 0.0
    size_power: float = 0.0


class _Grid(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    first: list[int]
    counts: list[int]


class _KernelTables(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    source: str
    kernels: dict[str, dict[str, dict[str, KernelCurve]]]
    grids: dict[str, _Grid]
    ratio_logs: dict[str, dict[str, dict[str, list[float]]]]


def kernel_seconds(
    curve: KernelCurve,
    flops_s: Any,
    bytes_s: Any,
    block_s: Any = 0.0,
    size: Any = 1.0,
    larger: Callable[[Any, Any], Any] = max,
    smaller: Callable[[Any, Any], Any] = min,
) -> Any:
    """Time a call, or calls as arrays.

    Args:
        curve: constants.
        flops_s: seconds of its FLOPs at the sheet's peak.
        bytes_s: seconds of its bytes at the sheet's bandwidth.
        block_s: seconds of a block of queries at the peak of the whole card.
        size: channels of a head over 128.
        larger, smaller: of two numbers or arrays.
    """
    # Heads with more channels reach more of the peak, as `size_power` says.
    gain = size**curve.size_power
    computing = (flops_s / curve.peak + curve.block * block_s) / gain
    moving = bytes_s / curve.bandwidth
    # What the longer of the two does not hide.
    shorter = curve.exposed * smaller(computing, moving)
    return curve.fixed_s + larger(computing, moving) + shorter


@dataclass(frozen=True)
class KernelSpeed:
    """Speed of a kind of kernel on a GPU: the sheet's FLOPs and bytes per second, a curve, and the
    ratios by sizes of kinds that have them."""

    flops_per_s: float
    bytes_per_s: float
    curve: KernelCurve
    ratios: SizeRatios | None = None

    def seconds(
        self,
        flops: float,
        num_bytes: float,
        length: float = 0.0,
        size: float = _USUAL_SIZE,
        sizes: tuple[float, ...] = (),
    ) -> float:
        """Time one kernel; nothing at all takes no time.

        Args:
            flops: that it computes.
            num_bytes: that it moves.
            length: tokens that the last query of a prompt attends to.
            size: channels of a head.
            sizes: of a product, rows, columns and depth; of attention in decode, tokens that a
                request attends to and key-value heads of all requests.
        """
        if not flops and not num_bytes:
            return 0.0
        # FLOPs of 128 queries against `length` keys: two products of 2 FLOPs an element.
        block_s = 4.0 * _BLOCK_QUERIES * length * size / self.flops_per_s
        found: float = kernel_seconds(
            self.curve, flops / self.flops_per_s, num_bytes / self.bytes_per_s, block_s,
            size / _USUAL_SIZE,
        )  # fmt: skip
        return found * self.ratios.at(sizes) if self.ratios else found


@dataclass(frozen=True)
class CardSpeed:
    """All kinds of kernels of a GPU, and its memory by the sheet."""

    products: KernelSpeed
    decode_attention: KernelSpeed
    prefill_attention: KernelSpeed
    memory_bytes_per_s: float


def card_speed(
    gpu: GpuType, precision: str, in_fp8: bool = False, engine: str = "vllm"
) -> CardSpeed:
    """Return the speeds of a GPU type.

    Args:
        gpu: the type.
        precision: of activations, one that it computes in.
        in_fp8: products are in fp8, where the type has it.
        engine: whose kernels they are; "any" takes vLLM's.
    """
    peak = gpu.peak_flops[precision]
    if peak is None:
        raise ProfileError(f"{gpu.name} does not compute in {precision}")
    # fp8 weights compute in fp8 only on cards that have it.
    eight_bits = gpu.peak_flops.get("fp8") if in_fp8 else None
    # A type without a table borrows that of its chip, in parts of its own data sheet.
    name = _TWIN.get(gpu.name, gpu.name)
    own = _tables_of(engine)

    def speed(kind: str, flops_per_s: float) -> KernelSpeed:
        # Without either, what holds for cards on the whole.
        curves = _tables().kernels[kind][own]
        card = name if name in curves else _DEFAULT
        curve = curves[card]
        if gpu.name not in curves:
            flops_per_s *= part_kept_up(gpu, curve.peak)
        # Which sizes fill a chip is a matter of the chip itself.
        ratios = _ratios(kind, own, card) if gpu.name in curves else None
        return KernelSpeed(flops_per_s, gpu.memory_bytes_per_s, curve, ratios)

    return CardSpeed(
        speed("products", eight_bits or peak),
        speed("decode_attention", peak),
        speed("prefill_attention", peak),
        gpu.memory_bytes_per_s,
    )


def table_of(gpu_name: str, engine: str) -> str | None:
    """Return the GPU type whose tables price another: itself, or one of its chip; None where the
    curve of all cards does."""
    name = _TWIN.get(gpu_name, gpu_name)
    return name if name in _tables().kernels["products"][_tables_of(engine)] else None


def _tables_of(engine: str) -> str:
    # Pipelines that no engine runs are priced as if vLLM ran them.
    return "sglang" if engine == "sglang" else "vllm"


@cache
def _ratios(kind: str, engine: str, card: str) -> SizeRatios | None:
    tables = _tables()
    if kind not in tables.grids:
        return None
    grid = SizeGrid(tuple(tables.grids[kind].first), tuple(tables.grids[kind].counts))
    return SizeRatios(grid, tables.ratio_logs[kind][engine][card])


@cache
def _tables() -> _KernelTables:
    with resources.as_file(resources.files(__package__) / "kernels.json") as path:
        return validate_document(read_json(Path(path)), _KernelTables, ProfileError)
