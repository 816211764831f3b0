"""The GPUs that a cluster file can name without numbers, each with the source of its numbers.

Peaks are dense; tensor peaks are with fp32 accumulation, which training needs (GeForce cards run it
at half of the rate that their sheets print).  `fp32` is the peak outside the tensor cores, not
TF32.  They are where a plan starts when nothing was measured, no more: `profile.json` beats them.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from megatron_hetero.cluster.quantities import Bandwidth, MemorySize, Peak
from megatron_hetero.cluster.spec import GpuType
from megatron_hetero.errors import ClusterError
from megatron_hetero.files import near_names, read_json, validate_document

_VENDOR_WORDS = re.compile(r"\b(nvidia|amd|geforce|tesla|quadro|instinct)\b", re.IGNORECASE)


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    aliases: tuple[str, ...]
    memory: MemorySize
    nominal_memory: MemorySize
    bf16: Peak | None
    fp16: Peak | None
    fp32: Peak | None
    fp8: Peak | None
    memory_bandwidth: Bandwidth
    compute_capability: str | None
    source: str


class _Catalogue(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    memory_source: str
    gpus: tuple[_Entry, ...]


def gpu_type(name: str) -> GpuType:
    """The GPU of that name or alias; case, spaces, hyphens and the vendor's words do not count.

    Raises:
        ClusterError: no such GPU; the message has the nearest names and the way to add one's own.
    """
    types, names = _load()
    canonical = names.get(_normalise(name))
    if canonical is None:
        hint = near_names(name, gpu_type_names()) or f" (it has {', '.join(gpu_type_names())})"
        raise ClusterError(
            f'"{name}" is not a GPU of the catalogue{hint}; any other GPU can be described under '
            "gpu_types by its memory, memory_bandwidth and peaks"
        )
    return types[canonical]


def gpu_type_names() -> tuple[str, ...]:
    """Names of the catalogue, in its order (by generation)."""
    return tuple(_load()[0])


def _normalise(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", _VENDOR_WORDS.sub("", name).lower())


@cache
def _load() -> tuple[dict[str, GpuType], dict[str, str]]:
    """GPU types by name, and names by normalised name or alias."""
    types: dict[str, GpuType] = {}
    names: dict[str, str] = {}
    with resources.as_file(resources.files(__package__) / "catalogue.json") as path:
        catalogue = validate_document(read_json(Path(path)), _Catalogue, ClusterError)
    for entry in catalogue.gpus:
        types[entry.name] = GpuType(
            name=entry.name,
            memory_bytes=entry.memory,
            memory_bytes_per_s=entry.memory_bandwidth,
            peak_flops={
                "bf16": entry.bf16,
                "fp16": entry.fp16,
                "fp32": entry.fp32,
                "fp8": entry.fp8,
            },
            compute_capability=entry.compute_capability,
            source=entry.source,
        )
        for name in (entry.name, *entry.aliases):
            names.setdefault(_normalise(name), entry.name)
    return types, names
