"""What this process sees of its machine."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import socket
from typing import Any

import torch

from megatron_hetero.preflight.machine import MachineFacts
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.machine import local_addresses

_STEERING = ("NCCL_", "GLOO_", "CUDA_", "TORCH_NCCL_")


def collect_facts(rank: int) -> MachineFacts:
    """Facts of this rank; on a GPU it creates the CUDA context, as the job would."""
    name = socket.gethostname()
    gpu = _gpu_facts() if backend.cuda_is_usable() else {}
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
    free_bytes, _ = torch.cuda.mem_get_info(index)
    return {
        "gpu_name": torch.cuda.get_device_name(index),
        "gpu_capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
        "free_bytes": free_bytes,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "gpu_architectures": tuple(torch.cuda.get_arch_list()),
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _has_apex() -> bool:
    """NVIDIA's Apex with its compiled parts; a package of that name alone is another project's."""
    return all(
        importlib.util.find_spec(name) is not None
        for name in ("apex", "amp_C", "fused_weight_gradient_mlp_cuda")
    )
