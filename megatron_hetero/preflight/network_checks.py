"""Settings that make NCCL hang, choose unlike algorithms, or find no path between nodes.

The facts are from NCCL's documentation and from issues of NVIDIA/nccl (numbers beside each check).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from itertools import combinations

from megatron_hetero.flags.environment import has_no_peer_to_peer, peer_to_peer_settings
from megatron_hetero.plan.plan import Host
from megatron_hetero.preflight.finding import Finding
from megatron_hetero.preflight.job import Job

_FABRIC_BYTES_PER_S = 12.5e9
"""100 Gb/s: what InfiniBand and RoCE carry, and TCP between sites does not."""
PCIE_BYTES_PER_S = 31.5e9
"""16 lanes of PCIe 4.0: what is faster between two cards before Hopper is NVLink."""
_COLLECTIVES = ("NCCL_ALGO", "NCCL_PROTO")


def consumer_cards_do_not_try_p2p(job: Job) -> Iterator[Finding]:
    """Find nodes where NCCL may try peer-to-peer between cards that have none."""
    for host in job.plan.hosts:
        # The launch lines make these settings; the user's own variable may undo them.
        for setting in peer_to_peer_settings(host):
            if not _is_held_back(job, host.node):
                yield Finding(
                    "p2p-on-consumer-card",
                    "warning",
                    host.node,
                    setting.reason,
                    f"{setting.name}={setting.value} on {host.node}: safe, its GPUs then talk "
                    "through memory" + (", but for NVLink" if setting.value == "NVL" else ""),
                )


def _is_held_back(job: Job, node: str) -> bool:
    """Tell if NCCL's peer-to-peer on a node is off or limited to NVLink."""
    is_off = job.variable("NCCL_P2P_DISABLE")[node] == "1"
    return is_off or job.variable("NCCL_P2P_LEVEL")[node] in ("LOC", "0", "NVL")


def nvlink_is_not_switched_off(job: Job) -> Iterator[Finding]:
    """Find nodes whose NVLink goes unused by NCCL_P2P_DISABLE=1 or NCCL_P2P_LEVEL=LOC."""
    for host in job.plan.hosts:
        is_off = job.variable("NCCL_P2P_DISABLE")[host.node] == "1"
        level = job.variable("NCCL_P2P_LEVEL")[host.node]
        # The plan's times count on these links.
        joined = list(bridged_cards(job, host))
        if joined and (is_off or level in ("LOC", "0")):
            name = "NCCL_P2P_DISABLE=1" if is_off else f"NCCL_P2P_LEVEL={level}"
            yield Finding(
                "nvlink-switched-off",
                "warning",
                host.node,
                f"{name} also switches off what joins {' and '.join(joined[0])} (in the cluster "
                "file faster than PCIe), and the plan counts on it",
                f"NCCL_P2P_LEVEL=NVL on {host.node} instead, without NCCL_P2P_DISABLE",
            )


def bridged_cards(job: Job, host: Host) -> Iterator[tuple[str, str]]:
    """Yield pairs of the host's cards that the cluster file joins faster than PCIe could."""
    for one, other in combinations(host.type_by_device, 2):
        a, b = (job.cluster.device_by_name[name] for name in (one, other))
        types = host.type_by_device[one], host.type_by_device[other]
        # A consumer card without peer-to-peer goes through memory, whatever the file says.
        is_fast = job.cluster.link(a, b).bytes_per_s > PCIE_BYTES_PER_S
        if is_fast and not any(map(has_no_peer_to_peer, types)):
            yield one, other


def unlike_nodes_use_one_algorithm(job: Job) -> Iterator[Finding]:
    """Find unlike nodes whose algorithms may differ, and hang (NVIDIA/nccl#1136, #1110, #794)."""
    # Equal GPUs of one machine see one topology, and NCCL chooses alike on all ranks.
    if len(job.plan.hosts) == 1 and len(job.gpu_types) == 1:
        return
    for name in _COLLECTIVES:
        values = job.variable(name)
        if len(set(values.values())) > 1:
            yield Finding(
                "collective-algorithm-differs",
                "error",
                name,
                f"the machines disagree: {_by_node(values)}; a communicator with two answers hangs",
                f"one value of {name} on every machine",
            )
        # Nobody has chosen, and unlike GPUs may choose differently.
        elif len(job.gpu_types) > 1 and not any(values.values()):
            kinds = ", ".join(gpu.name for gpu in job.gpu_types)
            yield Finding(
                "collective-algorithm-open",
                "warning",
                name,
                f"communicators span {kinds}, which may each choose another one, and hang",
                f"{name}={'Ring' if name == 'NCCL_ALGO' else 'Simple'} on every machine",
            )


def algorithm_list_serves_every_collective(job: Job) -> Iterator[Finding]:
    """Find values of NCCL_ALGO that leave some collective without an algorithm.

    From NCCL 2.31 on, a list that names collectives leaves all others without one.
    """
    for node, value in job.variable("NCCL_ALGO").items():
        # A part without a collective's name serves all of them.
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
    """Find communicators with InfiniBand on one node and TCP on another (NVIDIA/nccl#878)."""
    for name in ("NCCL_NET", "NCCL_IB_DISABLE"):
        values = job.variable(name)
        # An empty value is no value.
        chosen = {v or "" for v in values.values()}
        if name == "NCCL_IB_DISABLE":
            chosen = {"1" if v == "1" else "0" for v in chosen}
        if len(chosen) > 1:
            yield Finding(
                "fabric-differs",
                "error",
                name,
                f"the machines disagree: {_by_node(values)}; one communicator cannot use "
                "InfiniBand on one machine and TCP on another",
                f"one value of {name} on every machine (NCCL_NET=Socket suits all)",
            )


def sites_are_joined_by_sockets(job: Job) -> Iterator[Finding]:
    """Find jobs over several sites in which NCCL might try a fabric inside a site."""
    names = [node.name for node in job.nodes]
    site = {node.name: node.site for node in job.nodes}
    # Bytes/s between nodes, by ordered pair.
    links = {
        (a, b): job.cluster.node_links[a, b].bytes_per_s for a in names for b in names if a != b
    }
    inside = [speed for (a, b), speed in links.items() if site[a] == site[b]]
    across = [speed for (a, b), speed in links.items() if site[a] != site[b]]
    # One site only, or no link within a site that looks like a fabric.
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
            "NCCL_NET=Socket on every machine",
        )


def hosts_reach_each_other(job: Job) -> Iterator[Finding]:
    """Find hosts of a job of several machines that are named by a loopback address."""
    # On one machine the loopback address is right.
    if len(job.plan.hosts) == 1:
        return
    for host in job.plan.hosts:
        if _is_loopback(host.host):
            role = "the rendezvous" if host is job.plan.hosts[0] else "the check of hosts"
            yield Finding(
                "rendezvous-loopback",
                "error",
                f"machine {host.node}",
                f"its host is {host.host}, which on every other machine is that one itself; {role} "
                "fails or hangs",
                f"give `host` of {host.node} in cluster.yaml its name or address in your network",
            )


def interfaces_leave_the_machine(job: Job) -> Iterator[Finding]:
    """Find interfaces in NCCL's and Gloo's variables that end inside the machine."""
    if len(job.plan.hosts) == 1:
        return
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        for node, value in job.variable(name).items():
            # `^` excludes interfaces for NCCL by their first letters, and NCCL takes the first of
            # all others: its own list without loopback holds only where the variable is not set.
            if value is not None and value.startswith("^") and name.startswith("NCCL"):
                if not _leaves_out(value.lstrip("^"), "lo"):
                    yield Finding(
                        "interface-inside-machine",
                        "error",
                        node,
                        f"{name}={value} leaves the loopback interface in, which ends inside the "
                        "machine and comes first",
                        f"{name}={value},lo on {node}",
                    )
                continue
            # `=` before a name asks for exactly this interface.
            names = [part.lstrip("=") for part in (value or "").split(",") if part]
            if "lo" in names or any(_is_virtual(part) for part in names):
                yield Finding(
                    "interface-inside-machine",
                    "error",
                    node,
                    f"{name}={value} is an interface that ends inside the machine",
                    f"{name} of {node} to the card that leads to the others (`ip -br addr`)",
                )


def _leaves_out(excluded: str, interface: str) -> bool:
    """Tell if NCCL leaves an interface out: by the first letters of its name, after `=` by the
    whole name (`matchIfList` of NCCL's `socket.cc`)."""
    names = excluded.lstrip("=").split(",")
    if excluded.startswith("="):
        return interface in names
    return any(name and interface.startswith(name) for name in names)


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
    nvlink_is_not_switched_off,
    unlike_nodes_use_one_algorithm,
    algorithm_list_serves_every_collective,
    nodes_use_one_fabric,
    sites_are_joined_by_sockets,
    hosts_reach_each_other,
    interfaces_leave_the_machine,
)
