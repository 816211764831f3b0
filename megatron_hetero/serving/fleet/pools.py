"""Pools: machines of a cluster that are alike, so that a plan counts them and names them later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from megatron_hetero.cluster.names import device_place
from megatron_hetero.cluster.node_links import Link
from megatron_hetero.cluster.nodes import Device, GpuType, Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.errors import UnsupportedError, UsageError
from megatron_hetero.serving.compose.problem import Wire


@dataclass(frozen=True)
class Pool:
    """Machines of a single kind, site and price.

    Attributes:
        name: of the kind and site; unique.
        devices: of each machine, by the machine's name; idle ones left out.
        machine_price, gpu_price: an hour of a machine in use, and of each GPU in use.
    """

    name: str
    gpu: GpuType
    link: Link
    site: str
    devices: tuple[tuple[str, tuple[Device, ...]], ...]
    machine_price: float
    gpu_price: float

    @property
    def gpus_per_machine(self) -> int:
        """Return the GPUs of each machine."""
        return len(self.devices[0][1])


def pools_of(cluster: Cluster) -> tuple[Pool, ...]:
    """Group the machines of a cluster, in an order that does not depend on that of its file: of
    equally good fleets the search finds the same one.

    Raises:
        UnsupportedError: a machine with unlike cards is priced as a whole.
        UsageError: only some of the machines have a price.
    """
    # Machines that agree in everything that matters to a price or a speed are one group.
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in cluster.nodes:
        if node.is_island and node.price_per_hour:
            raise UnsupportedError(
                f"{node.machine} has unlike cards and one price for all of them; give each GPU "
                "type a price_per_hour instead"
            )
        free = free_devices(cluster, node)
        if free:
            key = (
                node.gpu_type.name, node.gpu_type.memory_bytes, len(free), node.site, node.link,
                node.price_per_hour, node.gpu_price_per_hour, node.uplink_bytes_per_s,
            )  # fmt: skip
            groups.setdefault(key, []).append(node)
    if not groups:
        raise UsageError("every GPU of the cluster is idle by its limits; none is left to serve")
    # Prices are for all machines or for none.
    # A price of 0 is a price; only a price that is not given is none.
    nodes = [node for group in groups.values() for node in group]
    priced = [n.price_per_hour is not None or n.gpu_price_per_hour is not None for n in nodes]
    if any(priced) and not all(priced):
        lacking = nodes[priced.index(False)]
        raise UsageError(
            f"{lacking.machine} has no price_per_hour, and others have: give all of them one, or "
            "none"
        )
    # Name each group by GPU type and site.
    names: dict[str, int] = {}
    found = []
    for group in sorted(groups.values(), key=_order):
        first = group[0]
        name = f"{first.gpu_type.name} at {first.site}"
        names[name] = names.get(name, 0) + 1
        if names[name] > 1:
            name = f"{name} ({names[name]})"
        devices = tuple((n.name, free_devices(cluster, n)) for n in group)
        prices = first.price_per_hour or 0.0, first.gpu_price_per_hour or 0.0
        found.append(Pool(name, first.gpu_type, first.link, first.site, devices, *prices))
    return tuple(found)


def _order(group: list[Node]) -> tuple[str, str, float, float, float, float, float, float, int]:
    """Return the place of a group of like machines among groups: by all that tells them apart."""
    first = group[0]
    return (
        first.gpu_type.name, first.site, -len(first.devices), first.price_per_hour or 0.0,
        first.gpu_price_per_hour or 0.0, -first.link.bytes_per_s, first.link.latency_s,
        -first.uplink_bytes_per_s, -first.gpu_type.memory_bytes,
    )  # fmt: skip


def has_prices(cluster: Cluster) -> bool:
    """Tell if machines or GPUs have a price; 0 is one."""
    return any(
        n.price_per_hour is not None or n.gpu_price_per_hour is not None for n in cluster.nodes
    )


def link_between(cluster: Cluster, one: Pool, other: Pool) -> Link | None:
    """Return the slowest link between machines of two pools, or within a pool that is given twice;
    None for a pool of a single machine given twice."""
    links = [
        # Pairs of two machines, as a machine hands nothing over to itself by the network.
        cluster.node_links[a, b] for a, _ in one.devices for b, _ in other.devices if a != b
    ]  # fmt: skip
    return min(links, key=lambda link: (link.bytes_per_s, -link.latency_s), default=None)


def wires_of(cluster: Cluster, pools: tuple[Pool, ...]) -> tuple[Wire, ...]:
    """Return what limits the traffic of keys and values between and within pools: the machines'
    own links, and lines that sites share."""
    return tuple(_wires(cluster, pools))


def _wires(cluster: Cluster, pools: tuple[Pool, ...]) -> Iterator[Wire]:
    # Line -> its capacity and the pairs of pools that use it.
    on_line: dict[str, tuple[float, set[tuple[str, str]]]] = {}
    for one in pools:
        for other in pools:
            pair = frozenset({(one.name, other.name)})
            link = link_between(cluster, one, other)
            # Machines of two pools talk in pairs, as many at once as the smaller pool has.
            num_pairs = min(len(one.devices), len(other.devices))
            if link is None:
                # A pool of one machine: all its GPUs send at once.
                rate = one.link.bytes_per_s * one.gpus_per_machine
                yield Wire(f"inside {one.name}", pair, rate)
            else:
                yield Wire(f"{one.name} to {other.name}", pair, link.bytes_per_s * num_pairs)
            for line in cluster.site_lines.get((one.site, other.site), ()):
                on_line.setdefault(line.name, (line.bytes_per_s, set()))[1].update(pair)
    for name, (rate, pairs) in on_line.items():
        yield Wire(name, frozenset(pairs), rate)
    # Uplinks of a pool's machines together, out and in.
    for pool in pools:
        uplinks: Mapping[str, float] = {
            name: cluster.node_by_name[name].uplink_bytes_per_s for name, _ in pool.devices
        }
        total = sum(uplinks.values())
        if total < inf:
            others = [p.name for p in pools if p is not pool]
            yield Wire(f"out of {pool.name}", frozenset((pool.name, o) for o in others), total)
            yield Wire(f"into {pool.name}", frozenset((o, pool.name) for o in others), total)


def free_devices(cluster: Cluster, node: Node) -> tuple[Device, ...]:
    """Return the GPUs of a node that the cluster's limits leave to serve."""
    if cluster.library not in (None, node.gpu_type.library):
        return ()
    idle = set(cluster.limits.idle_devices)
    return tuple(
        d
        for d in node.devices
        if d.name not in idle and device_place(d.name)[0] not in idle and node.name not in idle
    )
