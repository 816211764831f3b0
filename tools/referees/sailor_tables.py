"""Sailor's tables (`benchmarks/tables/sailor.json`): layers by GPU type and width, and networks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from megatron_hetero.errors import FileFormatError
from megatron_hetero.files import read_json

TABLES = Path(__file__).resolve().parents[2] / "benchmarks" / "tables" / "sailor.json"
ELEMENT_BYTES = 4
"""The tables are of fp32 training."""

MEMORY_GIB = {
    "V100-16": 16,
    "A100-40": 40,
    "A100-80": 80,
    "GH-96": 96,
    "Titan-RTX": 24,
    "RTX-2080": 11,
    "RTX-3090": 24,
}

NO_ROUTE_S = 1e6
"""A message between ends whose network was not measured: so long that no plan with one wins."""

_LEAST_BYTES, _MOST_BYTES = 1e6 / 8, 512e6
"""Messages between which the fits are read; shorter ones fall below zero, longer ones run away."""


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one of the tables' models."""

    hidden_size: int
    num_layers: int
    num_heads: int
    seq_length: int
    vocab_size: int


@dataclass(frozen=True)
class Fit:
    """GB/s = c2 y^2 + c1 y + c0 with y = log2(bytes / 1e6)."""

    c2: float
    c1: float
    c0: float
    max_bytes_per_s: float

    def time_s(self, num_bytes: float) -> float:
        """Seconds of one message; the bandwidth is kept within the fit's range and maximum."""
        if num_bytes <= 0:
            return 0.0
        y = math.log2(min(max(num_bytes, _LEAST_BYTES), _MOST_BYTES) / 1e6)
        bytes_per_s = (self.c2 * y * y + self.c1 * y + self.c0) * 1e9
        if bytes_per_s <= 0:
            raise FileFormatError(
                f"{TABLES.name}: a fit gives {bytes_per_s / 1e9:.3f} GB/s at {num_bytes:.0f} bytes"
            )
        return num_bytes / min(bytes_per_s, self.max_bytes_per_s)


@dataclass(frozen=True)
class EntryTimes:
    """Seconds of one entry (embedding, layer or head) for a micro-batch, and of its update."""

    forward_s: float
    backward_s: float
    update_s: float


@dataclass(frozen=True)
class EntryMemory:
    """Elements of one entry, micro-batch 1."""

    num_params: int
    output_floats: int
    activation_floats: int


Endpoint = tuple[str, str, int]
"""(zone, GPU type, GPUs that send or receive at once)"""


class SailorTables:
    """The tables of one model at one micro-batch size."""

    def __init__(self, model: str, micro_batch_size: int) -> None:
        data = _data()
        if model not in data["shapes"]:
            raise FileFormatError(
                f"there are no tables of {model!r}; there are {', '.join(sorted(data['shapes']))}"
            )
        self.model = model
        self.micro_batch_size = micro_batch_size
        self.shape = ModelShape(*data["shapes"][model])
        self._times: dict[str, dict[str, dict[str, list[Any]]]] = data["layer_times"][model]
        self._memory: dict[str, list[Any]] = data["layer_memory"][model]
        self._entry_times: dict[tuple[str, int], tuple[EntryTimes, ...]] = {}
        self._entry_memory: dict[int, tuple[EntryMemory, ...]] = {}
        self._fits: dict[tuple[Endpoint, Endpoint], Fit | None] = {}

    @cached_property
    def num_entries(self) -> int:
        """Embedding, layers, and what stands behind the last layer."""
        return len(self.memory(1))

    def widths(self, gpu: str) -> tuple[int, ...]:
        """Tensor-parallel widths measured for a GPU type at this micro-batch size, ascending."""
        measured = self._times.get(gpu, {}).get(str(self.micro_batch_size), {})
        return tuple(sorted(int(w) for w in measured if w in self._memory))

    def times(self, gpu: str, width: int) -> tuple[EntryTimes, ...]:
        """Every entry's times.

        Raises:
            FileFormatError: not measured (which usually means out of memory).
        """
        key = (gpu, width)
        if key not in self._entry_times:
            by_width = self._times.get(gpu, {}).get(str(self.micro_batch_size), {})
            if str(width) not in by_width:
                raise FileFormatError(
                    f"{self.model} was not measured on {gpu} at TP {width} and micro-batch "
                    f"{self.micro_batch_size}"
                )
            self._entry_times[key] = tuple(
                EntryTimes(*row) for count, *row in by_width[str(width)] for _ in range(count)
            )
        return self._entry_times[key]

    def memory(self, width: int) -> tuple[EntryMemory, ...]:
        """Every entry's elements at a tensor-parallel width."""
        if width not in self._entry_memory:
            if str(width) not in self._memory:
                raise FileFormatError(f"the memory of {self.model} is not known at TP {width}")
            self._entry_memory[width] = tuple(
                EntryMemory(*row) for count, *row in self._memory[str(width)] for _ in range(count)
            )
        return self._entry_memory[width]

    def fit(self, sender: Endpoint, receiver: Endpoint) -> Fit | None:
        """The network between two ends, or the way back where only that was measured; else
        None."""
        key = (sender, receiver)
        if key not in self._fits:
            row = _fit_row(*sender, *receiver)
            row = _fit_row(*receiver, *sender) if row is None else row
            self._fits[key] = None if row is None else Fit(*_data()["fits"][row])
        return self._fits[key]

    def message_s(self, sender: Endpoint, receiver: Endpoint, num_bytes: float) -> float:
        """Seconds of one message; `NO_ROUTE_S` where the tables have no network."""
        fit = self.fit(sender, receiver)
        return NO_ROUTE_S if fit is None else fit.time_s(num_bytes)

    def entries(self, stage_layers: Sequence[int]) -> tuple[range, ...]:
        """The entries of each stage that holds so many layers: the ends hold the model's ends."""
        first, ranges = 0, []
        for index, num_layers in enumerate(stage_layers):
            end = first + num_layers + (index == 0)
            if index + 1 == len(stage_layers):
                end = self.num_entries
            ranges.append(range(first, end))
            first = end
        return tuple(ranges)


def _fit_row(*path: object) -> Any:
    node: Any = _data()["between"]
    for part in path:
        if str(part) not in node:
            return None
        node = node[str(part)]
    return node


@cache
def _data() -> Any:
    return read_json(TABLES).data
