"""Identity of a process's card: its place on the PCI bus, by which plans number cards.

CUDA itself puts the fastest card first unless `CUDA_DEVICE_ORDER=PCI_BUS_ID` is set, and leaves the
order of the others open, so that a number alone may mean another card than the plan's.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

_CARDS = Path("/proc/driver/nvidia/gpus")
"""A folder for each card known to NVIDIA's driver, by bus id."""


def visible_bus_ids() -> tuple[str, ...]:
    """Return the bus ids of the cards visible to this process, in torch's order.

    The result is empty if this torch does not know them.
    """
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    if not all(hasattr(properties, "pci_bus_id") for properties in found):
        return ()
    # As NVIDIA's driver writes them: domain, bus and device in hexadecimal.
    return tuple(f"{p.pci_domain_id:08x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0" for p in found)


def machine_bus_ids() -> tuple[str, ...]:
    """Return the bus ids of all cards of the machine, ascending; empty if the driver lists none."""
    if not _CARDS.is_dir():
        return ()
    return tuple(sorted(normal_bus_id(path.name) for path in _CARDS.iterdir()))


def normal_bus_id(text: str) -> str:
    """Normalize a bus id: a domain of eight digits, as `nvidia-smi` prints it, in lower case."""
    # Tools write the domain with four digits or with eight.
    domain, _, rest = text.lower().partition(":")
    return f"{domain:0>8}:{rest}"


def order_is_of_the_bus() -> bool:
    """Tell if CUDA numbers the cards by the bus; HIP always does."""
    return bool(torch.version.hip) or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
