"""Start of a plan: one `torchrun` line for each node, and the place of every global rank.

Nodes may contribute different numbers of GPUs: torchrun's static rendezvous numbers the ranks node
by node from each node's own `--nproc-per-node`.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_hetero.errors import PlanFormatError, UsageError
from megatron_hetero.flags.emit import is_stock, megatron_args
from megatron_hetero.flags.environment import EnvironmentSetting, job_settings, node_settings
from megatron_hetero.plan.checks.devices import is_host_name
from megatron_hetero.plan.plan import Host, Plan
from megatron_hetero.plan.ranks import rank_table

STOCK_ENTRY = ("pretrain_gpt.py",)
HETERO_ENTRY = ("-m", "megatron_hetero.pretrain_gpt")
DEFAULT_MASTER_PORT = 29500
ONE_MACHINE = (
    *("--rdzv-backend", "c10d", "--rdzv-conf", "store_type=file", "--local-addr", "localhost"),
)
"""Rendezvous of torchrun without a port; `--standalone` listens on all interfaces."""


@dataclass(frozen=True)
class NodeLaunch:
    """Command of one node. `host` is None for a plan without hosts, which may start anywhere."""

    node_rank: int
    host: str | None
    environment: tuple[tuple[str, str], ...]
    argv: tuple[str, ...]

    @property
    def line(self) -> str:
        """Return the command for a shell on the node."""
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.environment]
        return " ".join([*assignments, shlex.join(self.argv)])


@dataclass(frozen=True)
class RankRow:
    """One process: its machine and GPU, and its place in the plan.

    Host and GPU are None for a plan without hosts.
    """

    rank: int
    node_rank: int
    local_rank: int
    host: str | None
    gpu_type: str | None
    gpu_index: int | None
    replica: int
    stage: int
    tensor_rank: int
    context_rank: int = 0


def node_launches(
    plan: Plan, plan_path: str | None = None, *, master_port: int = DEFAULT_MASTER_PORT
) -> tuple[NodeLaunch, ...]:
    """Return the `torchrun` command of every node, by node rank.

    Args:
        plan: a valid plan.
        plan_path: path of the plan file on the nodes, if the plan needs it.
        master_port: port of the rendezvous on the first host.
    Raises:
        UsageError: as `megatron_args`; or `master_port` is out of range.
        PlanFormatError: a host name cannot be used, or two nodes claim one GPU of a host.
    """
    check_master_port(master_port)
    # The entry and Megatron's arguments are the same on every node.
    entry = STOCK_ENTRY if is_stock(plan) else HETERO_ENTRY
    command = (*entry, *megatron_args(plan, plan_path))
    # A bare layout starts on one machine, whichever that is.
    if not plan.hosts:
        argv = ("torchrun", *ONE_MACHINE, "--nproc-per-node", str(plan.layout.num_devices))
        return (NodeLaunch(0, None, _pairs(job_settings(plan)), (*argv, *command)),)
    check_hosts(plan.hosts)
    return tuple(
        NodeLaunch(
            node_rank,
            host.host,
            _pairs((*job_settings(plan), *node_settings(host))),
            (
                "torchrun",
                *_rendezvous(plan.hosts, node_rank, master_port),
                *command,
            ),
        )
        for node_rank, host in enumerate(plan.hosts)
    )


def _pairs(settings: Iterable[EnvironmentSetting]) -> tuple[tuple[str, str], ...]:
    return tuple((setting.name, setting.value) for setting in settings)


def rank_rows(plan: Plan) -> tuple[RankRow, ...]:
    """List every process of the launch by global rank; `plan` has to be valid."""
    # [rank]: replica, stage and place in the stage.
    places = rank_table(plan)
    if not plan.hosts:
        return tuple(
            RankRow(r, 0, r, None, None, None, p.replica, p.stage, p.tensor_rank, p.context_rank)
            for r, p in enumerate(places)
        )
    # torchrun numbers ranks node by node, and on a node by local rank.
    processes = [
        (node_rank, local_rank, host, index)
        for node_rank, host in enumerate(plan.hosts)
        for local_rank, index in enumerate(host.gpu_indices)
    ]
    return tuple(
        RankRow(
            rank,
            node_rank,
            local_rank,
            host.host,
            host.type_by_device[f"{host.node}:{gpu_index}"],
            gpu_index,
            place.replica,
            place.stage,
            place.tensor_rank,
            place.context_rank,
        )
        for rank, ((node_rank, local_rank, host, gpu_index), place) in enumerate(
            zip(processes, places, strict=True)
        )
    )


def _rendezvous(hosts: tuple[Host, ...], node_rank: int, master_port: int) -> tuple[str, ...]:
    processes = ("--nproc-per-node", str(len(hosts[node_rank].gpu_indices)))
    # One machine needs no port, which others could reach.
    if len(hosts) == 1:
        return (*ONE_MACHINE, *processes)
    return (
        # torchrun's static rendezvous, whose store is on the first host.
        *("--nnodes", str(len(hosts))),
        *("--node-rank", str(node_rank)),
        *processes,
        *("--master-addr", hosts[0].host),
        *("--master-port", str(master_port)),
    )


def check_master_port(master_port: int) -> None:
    """Refuse a port that a user's process cannot open.

    Raises:
        UsageError: below 1024, or none at all.
    """
    if not 1024 <= master_port <= 65535:
        raise UsageError(f"master port {master_port}; allowed is 1024 to 65535.")


def check_hosts(hosts: tuple[Host, ...], *, may_be_public: bool = False) -> None:
    """Refuse hosts on which no process can be started.

    Args:
        may_be_public: hosts may be named by public addresses.
    Raises:
        PlanFormatError: a host name cannot be used, or two nodes claim one GPU of a host.
    """
    # (host, GPU) -> the machine that starts a process there.
    node_of_gpu: dict[tuple[str, int], str] = {}
    for host in hosts:
        if not is_host_name(host.host):
            raise PlanFormatError(f"machine {host.node}: {host.host!r} is not a host name.")
        address = _address(host.host)
        # Several machines, or any machine, would answer to such an address.
        if address is not None and (address.is_unspecified or address.is_multicast):
            raise PlanFormatError(
                f"machine {host.node}: {host.host} is no address of one machine; name the host or "
                "give its private address."
            )
        if address is not None and address.is_global and not may_be_public:
            raise PlanFormatError(
                f"machine {host.node}: {host.host} is a public address, and the rendezvous knows "
                "no authentication; name the host or give its private address, or write launch "
                "files with --public-addresses where a firewall of yours keeps everybody else out."
            )
        for index in host.gpu_indices:
            other = node_of_gpu.setdefault((host.host, index), host.node)
            if other != host.node:
                raise PlanFormatError(
                    f"machines {other} and {host.node} both start a process on GPU {index} of host "
                    f"{host.host}. Give each machine its own host in the cluster file."
                )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
