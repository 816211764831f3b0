"""Gradients on the tree of links: what each site and machine sends and receives in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megatron_hetero.cluster.names import node_words
from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.plan import Plan
from megatron_hetero.report.page.figure import (
    PAGE_WIDTH,
    Figure,
    fitted,
    legend,
    line,
    rect,
    text,
)
from megatron_hetero.report.page.folding import Folded, folded
from megatron_hetero.schedule.simulator.step import StepSimulation
from megatron_hetero.units import format_bytes

_NAMES, _WORDS = 300.0, 250.0
_ROW, _INDENT = 24.0, 26.0


@dataclass
class Uplink:
    """Bytes of a step over what joins a part of the cluster to the rest."""

    name: str
    sent: float = 0.0
    received: float = 0.0


@dataclass
class SiteTraffic:
    """Traffic of a site: `uplink`, to and from the other sites; `machines`, the uplink of each
    machine."""

    uplink: Uplink
    machines: dict[str, Uplink] = field(default_factory=dict)


def traffic_of_gradients(cluster: Cluster, simulation: StepSimulation) -> dict[str, SiteTraffic]:
    """Add up, by site, what exchanges of gradients and of new weights carry out of each machine.

    Machines and sites that neither send nor receive any are left out.
    """
    found: dict[str, SiteTraffic] = {}
    for here, there, num_bytes in _between_nodes(_nodes(cluster), simulation):
        # Islands of one machine exchange over no uplink.
        if here.machine == there.machine:
            continue
        # Both ends carry the bytes: on the machine's uplink, and on the site's if they leave the
        # site.
        for node, is_sender in ((here, True), (there, False)):
            site = found.setdefault(node.site, SiteTraffic(Uplink(node.site)))
            machine = site.machines.setdefault(node.machine, Uplink(node.machine))
            for uplink in (machine, site.uplink)[: 1 if here.site == there.site else 2]:
                if is_sender:
                    uplink.sent += num_bytes
                else:
                    uplink.received += num_bytes
    return found


def _nodes(cluster: Cluster) -> dict[str, Node]:
    """Return nodes by the words that names of paths have."""
    return {node_words(node.name): node for node in cluster.nodes}


def _ends(nodes: Mapping[str, Node], path: str) -> tuple[Node, Node] | None:
    """Return the two nodes of a path between them; None for a line, a NIC or a port.

    Lines may be called `line a -> b` as well, by their sites or machines.
    """
    sender, _, receiver = path.partition(" -> ")
    return (nodes[sender], nodes[receiver]) if sender in nodes and receiver in nodes else None


def _between_nodes(
    nodes: Mapping[str, Node], simulation: StepSimulation
) -> Iterator[tuple[Node, Node, float]]:
    """Yield (sender, receiver, bytes) of every path between two nodes that an exchange takes."""
    for collective, _, _ in simulation.collectives:
        for (path, _), num_bytes in zip(collective.hops, collective.hop_bytes, strict=True):
            ends = _ends(nodes, path)
            if ends is not None:
                yield *ends, num_bytes


def _has_shared_lines(nodes: Mapping[str, Node], simulation: StepSimulation) -> bool:
    """Return whether an exchange takes a line or a NIC: neither a path of two nodes nor a GPU's
    port, whose name alone has no space before its direction."""
    paths = {path for collective, _, _ in simulation.collectives for path, _ in collective.hops}
    return any(path.count(" ") > 1 and _ends(nodes, path) is None for path in paths)


def exchange_tree(plan: Plan, cluster: Cluster, simulation: StepSimulation) -> Figure | None:
    """Draw sites, with the machines of each below, and a bar for the bytes sent and received.

    Returns:
        None where no gradient leaves a machine, or where gradients take lines or NICs that several
        paths share, whose bytes are not known by path.
    """
    sites = traffic_of_gradients(cluster, simulation)
    if not sites or _has_shared_lines(_nodes(cluster), simulation):
        return None
    # One scale for all bars.
    uplinks = [u for s in sites.values() for u in (s.uplink, *s.machines.values())]
    most = max(max(u.sent, u.received) for u in uplinks)
    room = PAGE_WIDTH - _NAMES - _WORDS
    order = list(cluster.machines)
    parts = [legend((("gradient_sync", "sent"), ("gradients t2", "received")), _NAMES, 12)]
    y = 26.0
    for site in sites.values():
        indent = 0.0
        # The site's own bar, and its machines below it on a line.
        if len(sites) > 1:
            parts += _row(site.uplink, f"site {site.uplink.name}", "strong", y, room / most)
            y, indent = y + _ROW, _INDENT
        top = y - 4
        rows = sorted(site.machines.values(), key=lambda u: order.index(u.name))
        for row in folded(rows, lambda _: None, lambda u: (u.sent / most, u.received / most)):
            words = _label(row)
            parts += _row(row.first, words, "label", y, room / most, indent)
            if indent:
                parts.append(line(10, y + 10, indent - 4, y + 10, "grid"))
            y += _ROW
        if indent:
            parts.append(line(10, top, 10, y - _ROW + 10, "grid"))
            y += 6
    # Groups in which gradients are reduced first.
    if plan.exchange_groups:
        named = [f"{group[0]} and {len(group) - 1} more" if len(group) > 1 else group[0]
                 for group in plan.exchange_groups[:4]]  # fmt: skip
        more = len(plan.exchange_groups) - len(named)
        words = f"Gradients are reduced inside each group of machines first: {' | '.join(named)}"
        words += f" | and {more} more groups" if more else ""
        words += "; owners' parts suit uplinks" if plan.exchange_uplinks else ""
        parts.append(text(0, y + 16, fitted(words, PAGE_WIDTH, 12), "small"))
        y += 24
    alt = "Bytes of gradients and new weights that sites and machines send and receive in a step"
    return Figure("exchange", alt, y + 4, "".join(parts))


def _label(row: Folded[Uplink]) -> str:
    return row.first.name + (f" and {row.num_more} alike" if row.num_more else "")


def _row(
    uplink: Uplink, name: str, kind: str, y: float, scale: float, indent: float = 0.0
) -> list[str]:
    """Draw a name, the two bars and their bytes.

    Args:
        uplink: what is drawn.
        name: before the bars.
        kind: class of the name.
        y: of the row's upper edge.
        scale: user units of a byte.
        indent: of the name.
    """
    sent, received = format_bytes(uplink.sent), format_bytes(uplink.received)
    title = f"{name}: sends {sent}, receives {received}"
    words = f"{sent} sent, {received} received"
    return [
        text(indent, y + 14, fitted(name, _NAMES - indent - 8, 13), kind),
        rect(_NAMES, y + 1, uplink.sent * scale, 8, "gradient_sync", title=title),
        rect(_NAMES, y + 10, uplink.received * scale, 8, "gradients t2", title=title),
        text(PAGE_WIDTH, y + 14, words, "small", anchor="end"),
    ]
