"""SkyPilot's names of GPUs."""

from __future__ import annotations

from megatron_hetero.errors import UsageError

_ACCELERATORS = {
    "A10": "A10",
    "A10G": "A10G",
    "A100-40GB": "A100",
    "A100-80GB": "A100-80GB",
    "A100-80GB-PCIe": "A100-80GB",
    "A30": "A30",
    "A40": "A40",
    "B200": "B200",
    "B300": "B300",
    "GH200-96GB": "GH200",
    "H100-80GB": "H100",
    "H100-PCIe": "H100",
    "H200": "H200",
    "L4": "L4",
    "L40": "L40",
    "L40S": "L40S",
    "MI300X": "MI300X",
    "RTX-3060": "RTX3060",
    "RTX-3080": "RTX3080",
    "RTX-3090": "RTX3090",
    "RTX-4070-Ti": "RTX4070Ti",
    "RTX-4090": "RTX4090",
    "RTX-5080": "RTX5080",
    "RTX-5090": "RTX5090",
    "RTX-6000-Ada": "RTX6000-Ada",
    "RTX-A4000": "RTXA4000",
    "RTX-A5000": "RTXA5000",
    "RTX-A6000": "RTXA6000",
    "RTX-PRO-6000-Server": "RTXPRO6000",
    "T4": "T4",
    "V100-16GB": "V100",
    "V100-32GB": "V100-32GB",
}
"""The catalogue's name -> SkyPilot's (`sky show-gpus --all`)."""


def accelerator_name(gpu_type: str) -> str:
    """Return SkyPilot's name of a GPU of the catalogue.

    Raises:
        UsageError: it is not known here.
    """
    accelerator = _ACCELERATORS.get(gpu_type)
    if accelerator is None:
        raise UsageError(
            f"SkyPilot has no name for {gpu_type} that is known here "
            f"(known: {', '.join(sorted(_ACCELERATORS))}). Launch by ssh, Slurm or Kubernetes."
        )
    return accelerator
