"""GPUs that a cluster file can name without numbers, with the source of each number.

Peaks are dense; tensor peaks are with fp32 accumulation, which training needs (GeForce cards run it
at half of the rate that their sheets print).  `fp32` is the peak outside the tensor cores, not
TF32.  They are where a plan starts when nothing was measured, no more: `profile.json` beats them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from megatron_hetero.cluster.file.quantities import Bandwidth, Latency, MemorySize, Peak
from megatron_hetero.cluster.makers import Library, cannot_train, library_of_name
from megatron_hetero.cluster.nodes import GpuType
from megatron_hetero.errors import ClusterError
from megatron_hetero.files import near_names, read_json, validate_document

# Words of makers and brands, which people write or leave out.
_VENDOR_WORDS = re.compile(
    r"\b(nvidia|amd|geforce|tesla|instinct|blackwell|generation)\b", re.IGNORECASE
)
_MEMORY_SIZE = re.compile(r"\b([0-9]+) ?gi?b?\b", re.IGNORECASE)


class _CatalogueEntry(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    name: str
    aliases: tuple[str, ...]
    memory: MemorySize
    nominal_memory: MemorySize
    bf16: Peak | None
    fp16: Peak | None
    fp32: Peak | None
    fp8: Peak | None
    best_product: Peak | None = None
    half_rate: bool = False
    board_watts: int | None = None
    memory_bandwidth: Bandwidth
    compute_capability: str | None
    link: Literal["NVLink", "Infinity Fabric", "PCIe 3.0", "PCIe 4.0", "PCIe 5.0"]
    link_bandwidth: Bandwidth
    bridge_bandwidth: Bandwidth | None = None
    library: Library
    source: str


class _Catalogue(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    memory_source: str
    link_source: str
    launch_time: Latency
    launch_source: str
    product_source: str
    power_source: str
    gpus: tuple[_CatalogueEntry, ...]


@dataclass(frozen=True)
class SheetLink:
    """The link between the GPUs of a machine as the maker builds it: one direction, by the sheet.

    `bridge_bytes_per_s` is of an NVLink bridge between two PCIe cards, None where none fits.
    """

    kind: str
    bytes_per_s: float
    bridge_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Spelling:
    """A GPU of the catalogue as names go: its own and others, its sizes, its link."""

    name: str
    aliases: tuple[str, ...]
    nominal_gb: int
    memory_bytes: int
    link: str


def gpu_type(name: str) -> GpuType:
    """Find the GPU of that name or alias; case, spaces, hyphens and the vendor's words do not
    count.

    Raises:
        ClusterError: no such GPU; the message has the nearest names and the way to add one's own.
    """
    types, names, *_ = _load()
    # Names are compared without what writers differ in: case, blanks, hyphens, "GiB" for "GB".
    canonical = names.get(_normalise(name))
    if canonical is None:
        raise ClusterError(
            f'"{name}" is not a GPU of the catalogue{_hint(name)}; any other GPU can be described '
            "under gpu_types by its memory, memory_bandwidth and peaks"
        )
    return types[canonical]


def gpu_type_names() -> tuple[str, ...]:
    """Return the names of the catalogue, in its order (by generation)."""
    return tuple(_load()[0])


def named_exactly(name: str) -> str | None:
    """Return the GPU of that name or alias, as `gpu_type` compares names; None where there is
    none."""
    return _load()[1].get(_normalise(name))


def spellings() -> tuple[Spelling, ...]:
    """Return the names of all GPUs, in the catalogue's order."""
    return _load()[3]


def usual_launch_s() -> float:
    """Return the seconds that a host takes to launch an operator, on any GPU."""
    return next(iter(_load()[0].values())).launch_s


def sheet_link(name: str) -> SheetLink:
    """Return the link between GPUs of that name inside a machine.

    Raises:
        ClusterError: as `gpu_type`.
    """
    return _load()[2][gpu_type(name).name]


def _hint(name: str) -> str:
    """Guess the GPU meant: one that begins so ("A100": its sizes), a near name, or what there
    is."""
    # A GPU of another maker is no slip of the keyboard, and gets its own reason.
    library = library_of_name(name)
    if library is not None and (why := cannot_train(name, library)):
        return f", and could not train: {why}"
    # Entries that begin like the name, else those that have all of its words, as "RTX 6000".
    wanted, names = _normalise(name), gpu_type_names()
    words = re.findall(r"[a-z]+[0-9]*|[0-9]+", _VENDOR_WORDS.sub("", name).lower())
    longer = [n for n in names if wanted and _normalise(n).startswith(wanted)] or [
        n
        for n in names
        if words and set(words) <= set(re.findall(r"[a-z]+[0-9]*|[0-9]+", n.lower()))
    ]
    # A few guesses help; more would only repeat the catalogue.
    if 0 < len(longer) <= 8:
        meant = " or ".join(f'"{n}"' for n in longer)
        return f" (did you mean {meant}?)"
    return near_names(name, names) or f" (it has {', '.join(names)})"


def _normalise(name: str) -> str:
    with_sizes = _MEMORY_SIZE.sub(r"\1gb", _VENDOR_WORDS.sub("", name))
    return re.sub(r"[^a-z0-9]", "", with_sizes.lower())


def _part_of_peak(entry: _CatalogueEntry) -> float | None:
    # The best product measured, as a part of the 16-bit peak.
    peak = entry.bf16 or entry.fp16
    return entry.best_product / peak if entry.best_product and peak else None


@cache
def _load() -> tuple[
    dict[str, GpuType], dict[str, str], dict[str, SheetLink], tuple[Spelling, ...]
]:
    """Read GPU types by name, names by normalised name or alias, links by name, and spellings."""
    types: dict[str, GpuType] = {}
    names: dict[str, str] = {}
    links: dict[str, SheetLink] = {}
    with resources.as_file(resources.files(__package__) / "catalogue.json") as path:
        catalogue = validate_document(read_json(Path(path)), _Catalogue, ClusterError)
    # One type for each entry, reached by its name and its aliases.
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
            library=entry.library,
            launch_s=catalogue.launch_time,
            best_product=_part_of_peak(entry),
            half_rate=entry.half_rate,
            board_watts=entry.board_watts,
        )
        links[entry.name] = SheetLink(entry.link, entry.link_bandwidth, entry.bridge_bandwidth)
        # The first GPU keeps a name that several entries give.
        for name in (entry.name, *entry.aliases):
            names.setdefault(_normalise(name), entry.name)
    # Spellings serve the guess of a card from somebody's words.
    spelled = tuple(
        Spelling(e.name, e.aliases, round(e.nominal_memory / 1e9), int(e.memory), e.link)
        for e in catalogue.gpus
    )
    return types, names, links, spelled
