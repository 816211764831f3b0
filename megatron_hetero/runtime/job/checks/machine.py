"""Checks of a process's place on the planned machine, and of the planned model."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import torch

from megatron_hetero.cluster.gpu_names import names_match
from megatron_hetero.cluster.names import device_place
from megatron_hetero.errors import EnvironmentMismatchError, UsageError
from megatron_hetero.flags.environment import NODE_VARIABLE, visible_devices_variable
from megatron_hetero.flags.planned_sizes import differing_sizes
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.communication.libraries import library_of
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Host, Plan
from megatron_hetero.plan.ranks import Position, place_name, rank_table
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.job.checks import bus


def check_binding(plan: Plan, rank: int, position: Position) -> None:
    """Refuse a rank that runs on another host or another GPU than the plan says.

    Without CUDA the run is a rehearsal of the plan on one machine, and there is nothing to compare.

    Raises:
        EnvironmentMismatchError: the message names the rank, the expected place and the actual one.
    """
    if position.device is None or not backend.cuda_is_usable():
        return
    host = next(h for h in plan.hosts if h.node == device_place(position.device)[0])
    _check_host(host, rank, position.device)
    # Megatron computes on the card of this number.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    found = torch.cuda.get_device_name(local_rank)
    _check_gpu(host, plan.type_by_device[position.device], rank, found)
    _check_place(host, rank, position.device, local_rank)


def _check_host(host: Host, rank: int, device: str) -> None:
    # On rented machines, whose names nobody knew before, the launch file says which node it is.
    if os.environ.get(NODE_VARIABLE) == host.node:
        return
    # A plan may name a host by any of its names, or by an address.
    names = {socket.gethostname(), socket.getfqdn(), socket.gethostname().partition(".")[0]}
    addresses = local_addresses()
    if host.host not in names and host.host not in addresses:
        raise EnvironmentMismatchError(
            f"rank {rank} is the plan's {device} on host {host.host}, but runs on "
            f"{socket.gethostname()} ({', '.join(sorted(addresses)) or 'no address'}). Start the "
            "nodes in the order that `megatron-hetero flags` prints, or correct `host` of node "
            f"{host.node} in cluster.yaml and plan again. Where machines get their names only when "
            f"they are rented, set {NODE_VARIABLE}={host.node} instead."
        )


def _check_gpu(host: Host, wanted: str, rank: int, found: str) -> None:
    if not names_match(wanted, found):
        raise EnvironmentMismatchError(
            f"rank {rank} on {host.host} has a {found!r}, the plan wants {wanted}. Check "
            f"{visible_devices_variable(library_of(host))} and the node order, or plan again for "
            "the GPUs that are there."
        )


def _check_place(host: Host, rank: int, device: str, local_rank: int) -> None:
    """Check the bus place of a card; the names of two cards of one type cannot tell them apart."""
    # Bus places of the visible cards, in the order of the plan's indices.
    seen = bus.visible_bus_ids()
    here = [bus_id for _, bus_id in sorted(zip(host.gpu_indices, seen, strict=False))]
    in_order = here == sorted(here)
    wanted = device_place(device)[1]
    # CUDA numbers the cards as the bus does, so an index means the planned card.
    if in_order and bus.order_is_of_the_bus():
        return
    order = (
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, as the lines of `megatron-hetero flags` do, and "
        f"{visible_devices_variable(library_of(host))}={','.join(map(str, host.gpu_indices))}."
    )
    if not in_order:
        raise EnvironmentMismatchError(
            f"rank {rank} is the plan's {device}, but CUDA numbers the cards of {host.host} "
            f"otherwise than the PCI bus, as the plan does: {', '.join(here)}. {order}"
        )
    # Where the system shows all cards of the bus, the card can be found by its place.
    cards = bus.machine_bus_ids()
    if cards and local_rank < len(seen):
        if seen[local_rank] in cards and cards.index(seen[local_rank]) == wanted:
            return
        raise EnvironmentMismatchError(
            f"rank {rank} is the plan's {device}, card {wanted} on the PCI bus of {host.host}, but "
            f"has the card at {seen[local_rank]} of {', '.join(cards)}. {order}"
        )
    if host.gpu_types:
        raise EnvironmentMismatchError(
            f"rank {rank} is the plan's {device}, and {host.host} has unlike cards ({host.kind}), "
            f"but nothing here says that CUDA numbers them as the plan does. {order}"
        )


def gpu_name(args: Any) -> str:
    """What this process computes on."""
    return torch.cuda.get_device_name(args.local_rank) if backend.cuda_is_usable() else "CPU"


def local_addresses() -> set[str]:
    """Return the addresses of this machine's own name."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)}
    except socket.gaierror:
        return set()


def binding_lines(plan: Plan) -> Iterator[str]:
    """Yield, for the log, the place of every rank in the plan."""
    yield f"> megatron-hetero: {format_layout(plan.layout)}"
    for rank, place in enumerate(rank_table(plan)):
        device = f" on {place.device}" if place.device is not None else ""
        yield f">   rank {rank}{device}: {place_name(place, plan.layout)}"


def check_same_model(plan: Plan, workload: Workload) -> None:
    """Refuse flags that describe a model or batch unlike the plan's.

    Raises:
        UsageError: the message names every size that differs, with both values.
    """
    if plan.workload is None:
        return
    differing = differing_sizes(plan, workload)
    if differing:
        raise UsageError(
            "the flags describe another job than the plan was made for:\n  "
            + "\n  ".join(differing)
            + "\nUse the flags that `megatron-hetero flags` prints, or plan again with these."
        )
