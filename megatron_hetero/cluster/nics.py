"""Several network cards (NICs) of one machine: which GPU sends over which."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Nics:
    """The NICs of a machine, all alike: `bytes_per_s` of each, in each direction.

    `near` has for each GPU, in the order of the bus, the number of the NIC over which it sends and
    receives.
    """

    bytes_per_s: float
    near: tuple[int, ...]

    @property
    def num(self) -> int:
        """Return how many there are; each has a GPU near it."""
        return max(self.near) + 1

    @property
    def total_bytes_per_s(self) -> float:
        """Return the bytes/s of all NICs together, in each direction."""
        return self.num * self.bytes_per_s

    def faster(self, factor: float) -> Nics:
        """Return the same with `factor` times the bandwidth."""
        return replace(self, bytes_per_s=factor * self.bytes_per_s)


def near_in_order(num_gpus: int, num_nics: int) -> tuple[int, ...]:
    """Divide GPUs among NICs in the order of the bus, as evenly as they go (`Nics.near`)."""
    return tuple(gpu * num_nics // num_gpus for gpu in range(num_gpus))


def nic_name(machine: str, number: int) -> str:
    """Return the name of a machine's NIC: `NIC 0 of a`, which no node can be called."""
    return f"NIC {number} of {machine}"
