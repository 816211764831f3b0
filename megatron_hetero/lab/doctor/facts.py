"""Collection of the facts of a machine seen from a process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
from typing import Any

import torch

from megatron_hetero.cluster.inventory.discovery import find_gpus
from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.model.spec import ModelSpec
from megatron_hetero.preflight.machine import MachineFacts
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.checks import bus
from megatron_hetero.runtime.job.checks.machine import local_addresses
from megatron_hetero.runtime.transformer_engine.attention import attention_kernel

_STEERING = ("NCCL_", "RCCL_", "GLOO_", "CUDA_", "HIP_", "ROCR_", "HSA_", "TORCH_NCCL_")


def collect_facts(rank: int, model: ModelSpec | None = None) -> MachineFacts:
    """Collect the facts of this rank; on a GPU this creates the CUDA context, as the job would.

    `model`: the job's, for the attention kernel that Transformer Engine has for it here.
    """
    name = socket.gethostname()
    gpu = _gpu_facts() if backend.cuda_is_usable() else {}
    if gpu and model is not None:
        gpu["attention"] = attention_kernel(model)
    return MachineFacts(
        rank=rank,
        host_names=tuple(dict.fromkeys((name, socket.getfqdn(), name.partition(".")[0]))),
        addresses=tuple(sorted(local_addresses())),
        interfaces=tuple(interface for _, interface in socket.if_nameindex()),
        torch=torch.__version__,
        megatron_core=_version("megatron-core"),
        transformer_engine=_version("transformer-engine") or _version("transformer_engine_torch"),
        has_apex=_has_apex(),
        environment={
            key: value[:256] for key, value in os.environ.items() if key.startswith(_STEERING)
        },
        **gpu,
    )


def _gpu_facts() -> dict[str, Any]:
    index = int(os.environ.get("LOCAL_RANK", "0"))
    torch.cuda.set_device(index)
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return {
        "gpu_name": torch.cuda.get_device_name(index),
        # ROCm's torch makes such numbers of AMD's names, where they mean something else.
        "gpu_capability": None
        if torch.version.hip
        else ".".join(map(str, torch.cuda.get_device_capability(index))),
        "free_bytes": free_bytes,
        "total_bytes": total_bytes,
        "peers": tuple(
            other
            for other in range(torch.cuda.device_count())
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ),
        **_place_on_the_bus(index),
        "cuda": torch.version.hip or torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpu_architectures": tuple(torch.cuda.get_arch_list()),
    }


def _place_on_the_bus(index: int) -> dict[str, Any]:
    seen, cards = bus.visible_bus_ids(), bus.machine_bus_ids()
    # Without bus ids CUDA's numbers cannot be matched with the driver's list.
    if index >= len(seen):
        return {}
    try:
        screens = [bus.normal_bus_id(gpu.bus_id) for gpu in find_gpus() if gpu.drives_screen]
    except EnvironmentMismatchError:  # no nvidia-smi: nobody says
        screens = []
    own = seen[index]
    return {
        "bus_id": own,
        "bus_place": cards.index(own) if own in cards else None,
        "drives_screen": own in screens,
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_apex() -> bool:
    """Tell if NVIDIA's Apex is installed with kernels, and not a different project of the same
    name."""
    return all(
        importlib.util.find_spec(name) is not None
        for name in ("apex", "amp_C", "fused_weight_gradient_mlp_cuda")
    )
