"""Facts about a machine, seen by a process on it and sent to rank 0 as JSON."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Name = Annotated[str, Field(max_length=256)]


class MachineFacts(BaseModel):
    """Facts of one rank's machine; a fact that is unknown, or that needs a GPU, is None or empty.

    `gpu_architectures` lists what the installed torch was built for, as
    `torch.cuda.get_arch_list()` names it (`sm_80`, `compute_90`). `environment` holds the variables
    that steer NCCL, gloo and CUDA. `bus_place` is the number of the card among all of the machine,
    by PCI bus id. `peers` are the local ranks whose cards it can reach by peer-to-peer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: Annotated[int, Field(ge=0)]
    host_names: tuple[Name, ...] = ()
    addresses: tuple[Name, ...] = ()
    interfaces: tuple[Name, ...] = ()
    gpu_name: Name | None = None
    gpu_capability: Name | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    bus_id: Name | None = None
    bus_place: int | None = None
    drives_screen: bool = False
    peers: tuple[int, ...] | None = None
    torch: Name
    cuda: Name | None = None
    nccl: Name | None = None
    megatron_core: Name | None = None
    transformer_engine: Name | None = None
    has_apex: bool = False
    attention: Name | None = None
    gpu_architectures: tuple[Name, ...] = ()
    environment: dict[Name, Name] = {}
