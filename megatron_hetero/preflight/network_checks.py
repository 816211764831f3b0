"""What makes NCCL hang, choose unlike algorithms, or find no way between the nodes of a plan.

The facts are from NCCL's documentation and from issues of NVIDIA/nccl (numbers beside each check).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from megatron_hetero.flags.environment import has_no_peer_to_peer
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.job import Job

_FABRIC_BYTES_PER_S = 12.5e9
"""100 Gb/s: what InfiniBand and RoCE carry, and TCP between sites does not."""
_COLLECTIVES = ("NCCL_ALGO", "NCCL_PROTO")


def consumer_cards_do_not_try_p2p(job: Job) -> Iterator[Finding]:
    disabled = job.variable("NCCL_P2P_DISABLE")
    for host, node in zip(job.plan.hosts, job.nodes, strict=True):
        if (
            len(host.gpu_indices) > 1
            and has_no_peer_to_peer(node.gpu_type.name)
            and disabled[node.name] != "1"
        ):
            yield Finding(
                "p2p-on-consumer-card",
                "warning",
                node.name,
                f"{node.gpu_type.name} has no peer-to-peer, and with some drivers collectives hang "
                "where NCCL believes it has",
                f"NCCL_P2P_DISABLE=1 on {node.name}: safe, its GPUs then talk through memory",
            )


def unlike_nodes_use_one_algorithm(job: Job) -> Iterator[Finding]:
    """NVIDIA/nccl#1136, #1110, #794: unlike nodes may settle on unlike algorithms, and hang."""
    if len(job.nodes) == 1:
        return
    for name in _COLLECTIVES:
        values = job.variable(name)
        if len(set(values.values())) > 1:
            yield Finding(
                "collective-algorithm-differs",
                "error",
                name,
                f"the nodes disagree: {_by_node(values)}; a communicator with two answers hangs",
                f"one value of {name} on every node",
            )
        elif len(job.gpu_types) > 1 and not any(values.values()):
            kinds = ", ".join(gpu.name for gpu in job.gpu_types)
            yield Finding(
                "collective-algorithm-open",
                "warning",
                name,
                f"communicators span {kinds}, which may each choose another one, and hang",
                f"{name}={'Ring' if name == 'NCCL_ALGO' else 'Simple'} on every node",
            )


def algorithm_list_serves_every_collective(job: Job) -> Iterator[Finding]:
    """From NCCL 2.31 on a list that names collectives leaves all others without an algorithm."""
    for node, value in job.variable("NCCL_ALGO").items():
        if value and ":" in value and all(":" in part for part in value.split(";")):
            yield Finding(
                "collective-algorithm-incomplete",
                "error",
                node,
                f"NCCL_ALGO={value} names single collectives; from NCCL 2.31 on the others have "
                "no algorithm left",
                f"NCCL_ALGO='ring,tree;{value}' (first for all, then the exceptions)",
            )


def nodes_use_one_fabric(job: Job) -> Iterator[Finding]:
    """NVIDIA/nccl#878: one communicator cannot use InfiniBand here and TCP there."""
    for name in ("NCCL_NET", "NCCL_IB_DISABLE"):
        values = job.variable(name)
        chosen = {v or "" for v in values.values()}
        if name == "NCCL_IB_DISABLE":
            chosen = {"1" if v == "1" else "0" for v in chosen}
        if len(chosen) > 1:
            yield Finding(
                "fabric-differs",
                "error",
                name,
                f"the nodes disagree: {_by_node(values)}; one communicator cannot use InfiniBand "
                "on one node and TCP on another",
                f"one value of {name} on every node (NCCL_NET=Socket suits all)",
            )


def sites_are_joined_by_sockets(job: Job) -> Iterator[Finding]:
    names = [node.name for node in job.nodes]
    site = {node.name: node.site for node in job.nodes}
    links = {
        (a, b): job.cluster.node_links[a, b].bytes_per_s for a in names for b in names if a != b
    }
    inside = [speed for (a, b), speed in links.items() if site[a] == site[b]]
    across = [speed for (a, b), speed in links.items() if site[a] != site[b]]
    if not across or not inside or max(inside) < _FABRIC_BYTES_PER_S:
        return
    sockets = [
        net == "Socket" or disabled == "1"
        for net, disabled in zip(
            job.variable("NCCL_NET").values(),
            job.variable("NCCL_IB_DISABLE").values(),
            strict=True,
        )
    ]
    if max(across) < _FABRIC_BYTES_PER_S and not all(sockets):
        yield Finding(
            "fabric-across-sites",
            "warning",
            "the sites " + ", ".join(sorted(set(site.values()))),
            "inside a site the links are as fast as InfiniBand, between the sites they are not; "
            "NCCL would choose InfiniBand for groups that it cannot reach over it",
            "NCCL_NET=Socket on every node",
        )


def hosts_reach_each_other(job: Job) -> Iterator[Finding]:
    if len(job.plan.hosts) == 1:
        return
    for host in job.plan.hosts:
        if _is_loopback(host.host):
            role = "the rendezvous" if host is job.plan.hosts[0] else "the check of hosts"
            yield Finding(
                "rendezvous-loopback",
                "error",
                f"node {host.node}",
                f"its host is {host.host}, which on every other node is that node itself; {role} "
                "fails or hangs",
                f"give `host` of {host.node} in cluster.yaml its name or address in your network",
            )


def interfaces_leave_the_machine(job: Job) -> Iterator[Finding]:
    if len(job.plan.hosts) == 1:
        return
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for node, value in job.variable(name).items():
            names = [part.lstrip("=") for part in (value or "").split(",") if part]
            if "lo" in names or any(_is_virtual(part) for part in names):
                yield Finding(
                    "interface-inside-machine",
                    "error",
                    node,
                    f"{name}={value} is an interface that ends inside the machine",
                    f"{name} of {node} to the card that leads to the other nodes (`ip -br addr`)",
                )


def _is_virtual(interface: str) -> bool:
    return interface.startswith(("docker", "virbr", "veth", "br-"))


def _is_loopback(host: str) -> bool:
    if host.lower().split(".")[0] in ("localhost", "ip6-localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _by_node(values: Mapping[str, str | None]) -> str:
    return ", ".join(f"{node}: {value or 'not set'}" for node, value in values.items())


CHECKS = (
    consumer_cards_do_not_try_p2p,
    unlike_nodes_use_one_algorithm,
    algorithm_list_serves_every_collective,
    nodes_use_one_fabric,
    sites_are_joined_by_sockets,
    hosts_reach_each_other,
    interfaces_leave_the_machine,
)
