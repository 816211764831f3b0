"""What NCCL's collectives reach over the NVLink of a machine, by kind of NVLink.

`nvlink.json` is made by `tools/make_nvlink.py` from measured tables of single collectives.  A GPU
type with as fast an NVLink as a type of the tables has its constants, one with an NVLink up to
`_NEAR` times faster or slower those of the nearest.  Others, PCIe among them, have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import log
from pathlib import Path
from typing import Any

from megatron_hetero.cluster.catalogue import named_exactly, sheet_link
from megatron_hetero.cluster.node_links import Link, NvlinkCurve
from megatron_hetero.files import read_json

_NEAR = 1.5
"""NVLinks further apart are of machines that are built otherwise: no switch joins V100s or P100s in
most of them."""
_PCIE_BYTES_PER_S = 64e9
"""Bandwidth of sixteen lanes of PCIe 5.0, the fastest in use.  A link that the file calls no faster
is not taken for NVLink."""


def nvlink_curve(name: str) -> NvlinkCurve | None:
    """Return the constants of the NVLink of a GPU type; None where no table is near it, or where
    the catalogue lacks the type."""
    if named_exactly(name) is None:
        return None
    sheet = sheet_link(name)
    return _nearest(sheet.bytes_per_s) if sheet.kind == "NVLink" else None


@cache
def with_collectives(link: Link, name: str) -> Link:
    """Return a machine's link with what collectives reach over it, where it is NVLink.

    Args:
        link: between any two GPUs of the machine, as the cluster file has it.
        name: of their type.
    """
    if link.bytes_per_s <= _PCIE_BYTES_PER_S:
        return link
    return replace(link, nvlink=nvlink_curve(name))


@cache
def _nearest(bytes_per_s: float) -> NvlinkCurve | None:
    curves = _curves()
    nearest = min(curves, key=lambda known: abs(log(known / bytes_per_s)))
    far = max(nearest / bytes_per_s, bytes_per_s / nearest)
    return curves[nearest] if far <= _NEAR else None


@cache
def _curves() -> Mapping[float, NvlinkCurve]:
    """Read the constants by one direction of a GPU's NVLink in bytes a second."""
    data: list[dict[str, Any]] = read_json(Path(__file__).with_name("nvlink.json")).data["curves"]
    return {float(entry["sheet_bytes_per_s"]): curve_from_data(entry) for entry in data}


def curve_from_data(entry: Mapping[str, Any]) -> NvlinkCurve:
    """Read an entry of `nvlink.json`."""
    numbers = {key: float(entry[key]) for key in NvlinkCurve.NUMBERS}
    parts = tuple(sorted((int(n), float(part)) for n, part in entry["group_parts"].items()))
    return NvlinkCurve(**numbers, group_parts=parts)
