"""Predictions that a plan carries: step time, bound, memory of each device, traffic and prices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceEstimate:
    """Predicted peak memory of a device, in bytes, by part (keys: weights, gradients, optimizer,
    activations, buffers, libraries, reserve).

    `libraries` is what CUDA and its libraries take, `reserve` what the plan leaves free.
    `peak_bytes` is the sum of all parts, the reserve included; `used_bytes` is without it.
    """

    capacity_bytes: int
    peak_bytes: int
    parts_bytes: Mapping[str, int]

    @property
    def used_bytes(self) -> int:
        """Return the peak without what is left free."""
        return self.peak_bytes - self.parts_bytes.get("reserve", 0)

    @property
    def tensor_bytes(self) -> int:
        """Return the peak of the tensors, which PyTorch's allocator counts."""
        return self.used_bytes - self.parts_bytes.get("libraries", 0)

    @property
    def used_part(self) -> float:
        """Return the part of the memory that is used at the peak."""
        return self.used_bytes / self.capacity_bytes


@dataclass(frozen=True)
class TrafficEstimate:
    """Traffic between two sites with a common cause, in both directions, and its price.

    `cause`: "replica 0, stages 2 to 3", or "gradients" (and new weights).
    """

    cause: str
    sites: tuple[str, ...]
    bytes_per_step: float
    price_per_hour: float


@dataclass(frozen=True)
class Estimates:
    """Predictions of the planner.  `bound_s` is a lower bound on the step time of any plan of the
    space searched, `gap = step_time_s / bound_s - 1`; both None when no bound was computed.
    `bound_relaxes` says in words what the bound leaves out. `bound_s` may cover only plans without
    context parallelism; `bound_with_context_parallel_s` is then the bound of plans that divide
    sequences in equal parts, 0 if no bound of these is known.
    `measured` is False when no profile.json stood behind the numbers."""

    step_time_s: float
    tokens_per_s: float
    bound_s: float | None
    gap: float | None
    replica_times_s: tuple[float, ...]
    stage_times_s: tuple[tuple[float, ...], ...]
    """Forward + backward of one micro-batch, [replica][stage], TP communication included."""
    boundary_times_s: tuple[tuple[float, ...], ...]
    """One crossing of boundary i -> i+1, [replica][boundary]."""
    gradient_sync_s: float
    devices: Mapping[str, DeviceEstimate]
    bound_relaxes: str = ""
    bound_with_context_parallel_s: float | None = None
    measured: bool = False
    price_per_hour: float | None = None
    """Price of the machines in use, in the cluster file's currency; None where it gives none."""
    price_per_million_tokens: float | None = None
    """Price of machines, and of traffic between sites."""
    traffic_price_per_hour: float | None = None
    """Price of all traffic between sites; beside `price_per_hour`."""
    traffic: tuple[TrafficEstimate, ...] = ()
    """Causes of traffic, the dearest first; small causes of large plans are one, "others"."""
