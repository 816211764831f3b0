"""The cluster with the plan on it: sites, nodes, GPUs, and the stage and replica that each runs.

A replica has a colour, whose tint alternates along its stages; the words say the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.nodes import Node
from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.checks.violation import layer_range, stages
from megatron_hetero.plan.chunks import layer_ranges
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.report.page.figure import PAGE_WIDTH, Figure, fitted, rect, text, text_width
from megatron_hetero.units import format_bandwidth, format_duration

# Sizes in user units: of a GPU's cell, of a card's edges and head, of an island's line.
NUM_COLORS = 8
_CELL, _CELL_HEIGHT, _CELLS_IN_ROW = 92.0, 46.0, 4
_WIDE, _WIDE_BOLD = 0.58, 0.64
"""Width of a character of the widest usual font, in font sizes: no text may leave its tile."""
_PAD, _HEAD, _GAP = 11.0, 46.0, 14.0
_ISLAND_HEAD = 19.0

Machine = tuple[Node, ...]
"""The islands of a machine; one, where all its GPUs are alike."""


def stage_class(replica: int, stage: int) -> str:
    """Return the classes of a tinted area for a stage."""
    return f"p{replica % NUM_COLORS} t{1 + (stage + 1) % 2}"


def cluster_map(plan: Plan, cluster: Cluster) -> Figure:
    """Draw every machine as a card, sites around them."""
    # Device -> (replica, stage number, stage).
    place_of = {device: (r, s, stage) for r, s, stage in stages(plan) for device in stage.devices}
    parts: list[str] = []
    y = 0.0
    # Sites in the order of the file; each is a frame around its machines.
    sites = tuple(dict.fromkeys(node.site for node in cluster.nodes))
    for site in sites:
        nodes = [node for node in cluster.nodes if node.site == site]
        machines = [cluster.machines[name] for name in dict.fromkeys(n.machine for n in nodes)]
        heading = f"site {site}" if len(sites) > 1 else "cluster"
        parts.append(text(_PAD, y + 18, heading, "strong"))
        words = _network(cluster, nodes)
        if words:
            parts.append(text(_PAD + text_width(heading, 13) + 16, y + 18, words, "small"))
        # The frame is drawn behind the last row, when its height is known.
        top = y
        y += 30
        for row in _rows(machines):
            x = _PAD
            for machine in row:
                parts.append(_card(cluster, machine, x, y, place_of))
                x += _card_width(machine) + _GAP
            y += max(_card_height(machine) for machine in row) + _GAP
        parts.append(rect(0.5, top + 0.5, PAGE_WIDTH - 1, y - top - 5, "site", rx=8))
        y += 10
    # Links between sites, as lines of text below.
    for line_words in _between_sites(cluster, sites):
        parts.append(text(_PAD, y + 8, line_words, "small"))
        y += 20
    num_used = len(place_of)
    gpus = f"{len(cluster.devices)} GPUs, {num_used} of them used"
    alt = f"{len(cluster.machines)} machines with {gpus}"
    return Figure("map", alt, y, "".join(parts))


def _rows(machines: Sequence[Machine]) -> list[list[Machine]]:
    """Place cards side by side as far as the width goes."""
    rows: list[list[Machine]] = [[]]
    used = _PAD
    # A card that does not fit begins the next row.
    for machine in machines:
        if rows[-1] and used + _card_width(machine) > PAGE_WIDTH - _PAD:
            rows.append([])
            used = _PAD
        rows[-1].append(machine)
        used += _card_width(machine) + _GAP
    return rows


def _num_gpus(machine: Machine) -> int:
    return sum(island.num_gpus for island in machine)


def _num_rows(machine: Machine) -> int:
    return sum(-(-island.num_gpus // _CELLS_IN_ROW) for island in machine)


def _card_width(machine: Machine) -> float:
    # At least three cells wide, so that the name of the machine fits.
    widest = max(min(island.num_gpus, _CELLS_IN_ROW) for island in machine)
    return 2 * _PAD + max(widest, 3) * _CELL


def _card_height(machine: Machine) -> float:
    islands = len(machine) * _ISLAND_HEAD if len(machine) > 1 else 0.0
    return _HEAD + islands + _num_rows(machine) * _CELL_HEIGHT + _PAD


def _card(
    cluster: Cluster,
    machine: Machine,
    x: float,
    y: float,
    place_of: dict[str, tuple[int, int, Stage]],
) -> str:
    """Draw a machine: its GPUs, of several islands each under a line that names them."""
    width, is_divided = _card_width(machine), len(machine) > 1
    number = _num_gpus(machine)
    kind = f"{number} GPUs" if is_divided else f"{number} x {machine[0].gpu_type.name}"
    name_width = width - 3 * _PAD - text_width(kind, 12)
    parts = [
        rect(x, y, width, _card_height(machine), "card", rx=8),
        text(x + _PAD, y + 20, fitted(machine[0].machine, name_width, 13), "strong"),
        text(x + width - _PAD, y + 20, kind, "small", anchor="end"),
    ]
    words = _inside(cluster, machine)
    if words:
        parts.append(text(x + _PAD, y + 36, words, "tiny"))
    # Cells row by row; an island begins a row of its own.
    top = y + _HEAD
    for island in machine:
        if is_divided:
            speed = format_bandwidth(island.link.bytes_per_s)
            between = f", {speed} between them" if island.num_gpus > 1 else ""
            words = f"{island.num_gpus} x {island.gpu_type.name}{between}"
            parts.append(text(x + _PAD, top + 12, words, "tiny"))
            top += _ISLAND_HEAD
        for i, device in enumerate(island.devices):
            cell_x = x + _PAD + (i % _CELLS_IN_ROW) * _CELL
            cell_y = top + (i // _CELLS_IN_ROW) * _CELL_HEIGHT
            parts.append(_cell(device.name, cell_x, cell_y, place_of))
        top += -(-island.num_gpus // _CELLS_IN_ROW) * _CELL_HEIGHT
    return "".join(parts)


def _inside(cluster: Cluster, machine: Machine) -> str:
    """Describe the links between the GPUs of a machine; of several islands, those from one to
    another."""
    if len(machine) == 1:
        speed = format_bandwidth(machine[0].link.bytes_per_s)
        return f"{speed} between its GPUs" if machine[0].num_gpus > 1 else ""
    names = [island.name for island in machine]
    # Islands may be joined by unlike links.
    speeds = {cluster.node_links[a, b].bytes_per_s for a in names for b in names if a != b}
    slowest, fastest = format_bandwidth(min(speeds)), format_bandwidth(max(speeds))
    return f"{slowest if slowest == fastest else f'{slowest} to {fastest}'} between these groups"


def _cell(device: str, x: float, y: float, place_of: dict[str, tuple[int, int, Stage]]) -> str:
    width, height = _CELL - 4, _CELL_HEIGHT - 4
    # A GPU that the plan leaves idle.
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
    # Short forms where the long ones do not fit.
    name = _first_that_fits([f"R{r} stage {s}", f"R{r} s{s}"], width - 11, 11.5 * _WIDE_BOLD)
    layers = _first_that_fits([layers, layers.rpartition(" ")[2]], width - 11, 11 * _WIDE)
    return (
        rect(x, y, width, height, stage_class(r, s), title=title, rx=4)
        + rect(x, y, 4, height, f"p{r % NUM_COLORS}", rx=2)
        + text(x + 9, y + 17, name, "cell-name")
        + text(x + 9, y + 33, layers, "cell-text")
    )


def _first_that_fits(words: Sequence[str], width: float, character_width: float) -> str:
    """Choose the first of `words` that a tile holds, else cut the last."""
    room = int(width / character_width)
    return next((word for word in words if len(word) <= room), words[-1][:room])


def _network(cluster: Cluster, nodes: Sequence[Node]) -> str:
    """Describe the links between the nodes of a site in words."""
    links = {
        (link.bytes_per_s, link.latency_s)
        for a in nodes
        for b in nodes
        if a.machine != b.machine
        for link in [cluster.node_links[a.name, b.name]]
    }
    if not links:
        return ""
    slowest, fastest = min(links), max(links)
    if len(links) == 1:
        latency = f"{format_duration(slowest[1])} latency"
        return f"{format_bandwidth(slowest[0])}, {latency} between machines"
    return f"{format_bandwidth(slowest[0])} to {format_bandwidth(fastest[0])} between machines"


def _between_sites(cluster: Cluster, sites: Sequence[str]) -> list[str]:
    # The first node of each site stands for the site.
    node_of = {node.site: node.name for node in reversed(cluster.nodes)}
    found = []
    for i, a in enumerate(sites):
        for b in sites[i + 1 :]:
            link = cluster.node_links[node_of[a], node_of[b]]
            shared = ", shared by all" if cluster.site_lines.get((a, b)) else ""
            found.append(
                f"{a} to {b}: {format_bandwidth(link.bytes_per_s)}{shared}, "
                f"{format_duration(link.latency_s)} latency"
            )
    return found
