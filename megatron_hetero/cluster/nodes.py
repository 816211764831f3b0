"""GPUs, their types, and the nodes that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from typing import NamedTuple

from megatron_hetero.cluster.makers import DEFAULT_LIBRARY, Library
from megatron_hetero.cluster.names import machine_of
from megatron_hetero.cluster.nics import Nics
from megatron_hetero.cluster.node_links import Link


@dataclass(frozen=True)
class GpuType:
    """One kind of GPU.  Peaks are dense (no sparsity) FLOP/s; None where the chip cannot do it."""

    name: str
    memory_bytes: int
    memory_bytes_per_s: float
    peak_flops: Mapping[str, float | None]
    """Keys "bf16", "fp16", "fp32", "fp8"."""
    compute_capability: str | None
    source: str
    library: Library = DEFAULT_LIBRARY
    """Communication library of its machines; GPUs of one job have one (`cluster.makers`)."""
    launch_s: float = 0.0  # of the host, for each operator (`cost.work.launches`)
    has_own_launch_time: bool = False
    """True if the cluster's description gives `launch_s`; a measurement does not replace that
    value."""
    best_product: float | None = None
    """Part of the 16-bit peak in the fastest products measured on the type; None if unknown."""
    half_rate: bool = False
    """True if 16-bit products that add in fp32 run at half the rate of the tensor cores."""
    board_watts: float | None = None
    """The most that the board draws, by its sheet; None if unknown."""

    @property
    def capability(self) -> float | None:
        """Return the compute capability as a number; None for a GPU without one (AMD)."""
        return None if self.compute_capability is None else float(self.compute_capability)

    @property
    def watts_per_flop(self) -> float | None:
        """Return the watts of the board for each FLOP/s of its 16-bit peak; None if unknown."""
        peak = self.peak_flops.get("bf16") or self.peak_flops.get("fp16")
        return self.board_watts / peak if self.board_watts and peak else None


@dataclass(frozen=True)
class Node:
    """A machine with `num_gpus` equal GPUs.  `link` joins any two of them.

    A machine whose cards are of several types, or joined unlike, is several nodes, its islands:
    each has cards of one type that are joined alike, to each other and to all others.  Islands of
    one machine have one `machine`, `host` and `site`; `gpu_indices` are their places on its PCI
    bus.  Links between islands stand with those between machines.

    `price_per_hour` is that of the whole machine, `gpu_price_per_hour` that of each GPU in use;
    None where it is not known.  All prices are in one currency of the user's.
    `uplink_bytes_per_s` is what all its GPUs together send to other nodes, and what they receive.
    """

    name: str
    gpu_type: GpuType
    num_gpus: int
    site: str
    host: str
    link: Link
    price_per_hour: float | None = None
    gpu_price_per_hour: float | None = None
    uplink_bytes_per_s: float = inf
    gpu_indices: tuple[int, ...] = ()
    """Empty: 0 to `num_gpus - 1`."""
    nics: Nics | None = None
    """NICs of a machine with several; `uplink_bytes_per_s` is no more than their sum."""
    root_complex_bytes_per_s: float = inf
    """Bandwidth that all traffic between the machine's islands shares."""

    @property
    def machine(self) -> str:
        """Return the name in the file of the machine that this is, or is an island of."""
        return machine_of(self.name)

    @property
    def is_island(self) -> bool:
        """Return whether the machine has more GPUs, of another kind or joined by another link."""
        return self.machine != self.name

    def with_faster_network(self, factor: float) -> Node:
        """Return the node with `factor` times the bandwidth of its uplink and of each NIC."""
        nics = self.nics and self.nics.faster(factor)
        return replace(self, uplink_bytes_per_s=factor * self.uplink_bytes_per_s, nics=nics)

    @cached_property
    def indices(self) -> tuple[int, ...]:
        """Return the places of its GPUs in the machine, ascending."""
        return self.gpu_indices or tuple(range(self.num_gpus))

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Return its GPUs, in the order of the bus."""
        return tuple(Device(self.name, index) for index in self.indices)


class Device(NamedTuple):
    """One GPU of node `node`: the `index`-th of its machine.  Its name in files is `machine:index`.

    A tuple, since the search makes and compares more of these than of anything else.
    """

    node: str
    index: int  # type: ignore[assignment]  # hides a method that nobody asks of a device

    @property
    def name(self) -> str:
        """Return `machine:index`, as files have it."""
        return f"{machine_of(self.node)}:{self.index}"
