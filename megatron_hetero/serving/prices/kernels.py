"""What kernels of inference reach on a GPU type: a roofline with a fixed cost, by measured tables.

A kernel takes `max(flops / (peak * a), bytes / (bandwidth * b)) + c`.  The three constants, of
products, of attention in prefill and in decode, are fitted to AIConfigurator's tables of single
kernels (`kernels.json` names the source; `tools/make_serving_kernels.py` makes it and says how far
off tables are that were left out).  A type without a table takes the median of the others' parts of
the sheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from megatron_hetero.cluster.spec import GpuType
from megatron_hetero.errors import ProfileError
from megatron_hetero.files import read_json, validate_document

_DEFAULT = "default"
_TWIN = {
    "A100-40GB": "A100-80GB", "A100-80GB-PCIe": "A100-80GB", "A800-80GB": "A100-80GB",
    "H800-80GB": "H100-80GB", "H100-NVL": "H100-80GB", "H100-PCIe": "H100-80GB",
    "GH200-96GB": "H200", "L40": "L40S", "RTX-6000-Ada": "L40S", "L4": "L40S",
    "RTX-PRO-6000": "RTX-PRO-6000-Server", "RTX-PRO-6000-Max-Q": "RTX-PRO-6000-Server",
}  # fmt: skip
"""Types of the same chip or generation, for which equal fractions of the data sheet are assumed."""


class _Curve(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    peak: float
    bandwidth: float
    fixed_s: float


class _KernelTables(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    source: str
    kernels: dict[str, dict[str, _Curve]]


@dataclass(frozen=True)
class KernelSpeed:
    """Speed of a kind of kernel on a GPU."""

    flops_per_s: float
    bytes_per_s: float
    fixed_s: float

    def seconds(self, flops: float, num_bytes: float) -> float:
        """Time one kernel; nothing at all takes no time."""
        if not flops and not num_bytes:
            return 0.0
        return max(flops / self.flops_per_s, num_bytes / self.bytes_per_s) + self.fixed_s


@dataclass(frozen=True)
class CardSpeed:
    """All kinds of kernels of a GPU, and its memory by the sheet.

    `is_measured`: the type itself, or its chip, has a table.
    """

    products: KernelSpeed
    decode_attention: KernelSpeed
    prefill_attention: KernelSpeed
    memory_bytes_per_s: float
    is_measured: bool


def card_speed(gpu: GpuType, precision: str, in_fp8: bool = False) -> CardSpeed:
    """Return the speeds of a GPU type.

    Args:
        gpu: the type.
        precision: of activations, one that it computes in.
        in_fp8: products are in fp8, where the type has it.
    """
    peak = gpu.peak_flops[precision]
    if peak is None:
        raise ProfileError(f"{gpu.name} does not compute in {precision}")
    eight_bits = gpu.peak_flops.get("fp8") if in_fp8 else None
    name = _TWIN.get(gpu.name, gpu.name)

    def speed(kind: str, flops_per_s: float) -> KernelSpeed:
        curve = _curves()[kind].get(name, _curves()[kind][_DEFAULT])
        return KernelSpeed(
            flops_per_s * curve.peak, gpu.memory_bytes_per_s * curve.bandwidth, curve.fixed_s
        )

    return CardSpeed(
        speed("products", eight_bits or peak),
        speed("decode_attention", peak),
        speed("prefill_attention", peak),
        gpu.memory_bytes_per_s,
        name in _curves()["products"],
    )


@cache
def _curves() -> Mapping[str, Mapping[str, _Curve]]:
    with resources.as_file(resources.files(__package__) / "kernels.json") as path:
        return validate_document(read_json(Path(path)), _KernelTables, ProfileError).kernels
