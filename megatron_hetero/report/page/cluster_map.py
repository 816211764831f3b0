"""The cluster with the plan on it: sites, nodes, GPUs, and which stage of which replica each runs.

A replica has a colour, whose tint alternates along its stages; the words say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.spec import Cluster, Node
from megatron_hetero.plan.chunks import layer_ranges
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.plan.violation import layer_range, stages
from megatron_hetero.report.page.figure import PAGE_WIDTH, Figure, fitted, rect, text, text_width
from megatron_hetero.units import format_bandwidth, format_duration

NUM_COLORS = 8
_CELL, _CELL_HEIGHT, _CELLS_IN_ROW = 82.0, 46.0, 4
_PAD, _HEAD, _GAP = 11.0, 46.0, 14.0


def stage_class(replica: int, stage: int) -> str:
    """The classes of a tinted area for a stage."""
    return f"p{replica % NUM_COLORS} t{1 + (stage + 1) % 2}"


def cluster_map(plan: Plan, cluster: Cluster) -> Figure:
    """Every node as a card, sites around them."""
    place_of = {device: (r, s, stage) for r, s, stage in stages(plan) for device in stage.devices}
    parts: list[str] = []
    y = 0.0
    sites = tuple(dict.fromkeys(node.site for node in cluster.nodes))
    for site in sites:
        nodes = [node for node in cluster.nodes if node.site == site]
        heading = f"site {site}" if len(sites) > 1 else "cluster"
        parts.append(text(_PAD, y + 18, heading, "strong"))
        words = _network(cluster, nodes)
        if words:
            parts.append(text(_PAD + text_width(heading, 13) + 16, y + 18, words, "small"))
        top = y
        y += 30
        for row in _rows(nodes):
            x = _PAD
            for node in row:
                parts.append(_card(node, x, y, place_of))
                x += _card_width(node) + _GAP
            y += max(_card_height(node) for node in row) + _GAP
        parts.append(rect(0.5, top + 0.5, PAGE_WIDTH - 1, y - top - 5, "site", rx=8))
        y += 10
    for line_words in _between_sites(cluster, sites):
        parts.append(text(_PAD, y + 8, line_words, "small"))
        y += 20
    num_used = len(place_of)
    alt = f"{len(cluster.nodes)} nodes with {len(cluster.devices)} GPUs, {num_used} of them used"
    return Figure("map", alt, y, "".join(parts))


def _rows(nodes: Sequence[Node]) -> list[list[Node]]:
    """Cards side by side as far as the width goes."""
    rows: list[list[Node]] = [[]]
    used = _PAD
    for node in nodes:
        if rows[-1] and used + _card_width(node) > PAGE_WIDTH - _PAD:
            rows.append([])
            used = _PAD
        rows[-1].append(node)
        used += _card_width(node) + _GAP
    return rows


def _card_width(node: Node) -> float:
    return 2 * _PAD + max(min(node.num_gpus, _CELLS_IN_ROW), 3) * _CELL


def _card_height(node: Node) -> float:
    num_rows = -(-node.num_gpus // _CELLS_IN_ROW)
    return _HEAD + num_rows * _CELL_HEIGHT + _PAD


def _card(node: Node, x: float, y: float, place_of: dict[str, tuple[int, int, Stage]]) -> str:
    width = _card_width(node)
    parts = [
        rect(x, y, width, _card_height(node), "card", rx=8),
        text(x + _PAD, y + 20, fitted(node.name, width / 2, 13), "strong"),
        text(x + width - _PAD, y + 20, f"{node.num_gpus} x {node.gpu_type.name}", "small",
             anchor="end"),
    ]  # fmt: skip
    if node.num_gpus > 1:
        words = f"{format_bandwidth(node.link.bytes_per_s)} between its GPUs"
        parts.append(text(x + _PAD, y + 36, words, "tiny"))
    for i in range(node.num_gpus):
        cell_x = x + _PAD + (i % _CELLS_IN_ROW) * _CELL
        cell_y = y + _HEAD + (i // _CELLS_IN_ROW) * _CELL_HEIGHT
        parts.append(_cell(f"{node.name}:{i}", cell_x, cell_y, place_of))
    return "".join(parts)


def _cell(device: str, x: float, y: float, place_of: dict[str, tuple[int, int, Stage]]) -> str:
    width, height = _CELL - 4, _CELL_HEIGHT - 4
    if device not in place_of:
        return rect(x, y, width, height, "idle", title=f"{device}: idle", rx=4) + text(
            x + width / 2, y + height / 2 + 4, "idle", "tiny", anchor="middle"
        )
    r, s, stage = place_of[device]
    last = stage.first_layer + stage.shape.num_layers - 1
    layers = layer_range(stage.first_layer, last)
    if stage.chunks:
        layers = f"{len(stage.chunks)} chunks"
    title = (
        f"{device}: replica {r}, stage {s}, layers {layer_ranges(stage)}, "
        f"tensor-parallel width {stage.shape.tensor_parallel}"
    )
    name = f"R{r} stage {s}"
    if len(name) > 10:
        name = f"R{r} s{s}"
    return (
        rect(x, y, width, height, stage_class(r, s), title=title, rx=4)
        + rect(x, y, 4, height, f"p{r % NUM_COLORS}", rx=2)
        + text(x + 9, y + 17, name, "cell-name")
        + text(x + 9, y + 33, layers, "cell-text")
    )


def _network(cluster: Cluster, nodes: Sequence[Node]) -> str:
    """The links between the nodes of a site, in words."""
    links = {
        (link.bytes_per_s, link.latency_s)
        for a in nodes
        for b in nodes
        if a.name != b.name
        for link in [cluster.node_links[a.name, b.name]]
    }
    if not links:
        return ""
    slowest, fastest = min(links), max(links)
    if len(links) == 1:
        return (
            f"{format_bandwidth(slowest[0])}, {format_duration(slowest[1])} latency between nodes"
        )
    return f"{format_bandwidth(slowest[0])} to {format_bandwidth(fastest[0])} between nodes"


def _between_sites(cluster: Cluster, sites: Sequence[str]) -> list[str]:
    node_of = {node.site: node.name for node in reversed(cluster.nodes)}
    found = []
    for i, a in enumerate(sites):
        for b in sites[i + 1 :]:
            link = cluster.node_links[node_of[a], node_of[b]]
            found.append(
                f"{a} to {b}: {format_bandwidth(link.bytes_per_s)}, "
                f"{format_duration(link.latency_s)} latency"
            )
    return found
