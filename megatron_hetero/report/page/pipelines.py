"""The replicas as pipelines: a box for each stage, wide as its layers, and the hops between."""

from __future__ import annotations

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.plan import Estimates, Plan, Replica
from megatron_hetero.report.page.cluster_map import NUM_COLORS, stage_class
from megatron_hetero.report.page.figure import PAGE_WIDTH, Figure, fitted, line, rect, text
from megatron_hetero.report.text.words import count, devices_by_node
from megatron_hetero.units import format_bandwidth, format_duration

_HOP, _HEIGHT, _TITLE, _MIN_BOX = 76.0, 74.0, 26.0, 118.0
_IN_ROW = 5
"""Stages side by side; longer pipelines go on in the next row."""


def pipelines(plan: Plan, cluster: Cluster, estimates: Estimates) -> Figure:
    """Draw one row (or more) for each replica."""
    total = sum(replica.num_micro_batches for replica in plan.replicas)
    parts: list[str] = []
    y = 0.0
    for r, replica in enumerate(plan.replicas):
        part = replica.num_micro_batches / total
        parts.append(text(0, y + 15, f"Replica {r}", "strong"))
        words = f"{replica.num_micro_batches} of {total} micro-batches a step ({part:.0%})"
        if replica.micro_batch_size is not None:
            words += f", {replica.micro_batch_size} sequences each"
        words += f"; its pipeline takes {format_duration(estimates.replica_times_s[r])}"
        parts.append(text(80, y + 15, words, "small"))
        y += _TITLE
        for start in range(0, len(replica.stages), _IN_ROW):
            parts.append(_row(r, replica, start, y, cluster, estimates))
            y += _HEIGHT + 10
        y += 10
    return Figure("pipelines", f"{len(plan.replicas)} pipelines", y, "".join(parts))


def _row(
    r: int, replica: Replica, start: int, y: float, cluster: Cluster, estimates: Estimates
) -> str:
    shown = range(start, min(start + _IN_ROW, len(replica.stages)))
    num_hops = len(shown) - (shown.stop == len(replica.stages))
    room = PAGE_WIDTH - _HOP * num_hops
    layers = [replica.stages[s].shape.num_layers for s in shown]
    free = room - _MIN_BOX * len(layers)
    long = len(replica.stages) > _IN_ROW  # then the boxes of all rows stand below each other
    parts: list[str] = []
    x = 0.0
    for s, num_layers in zip(shown, layers, strict=True):
        width = _MIN_BOX + free * num_layers / sum(layers)
        if long:
            width = PAGE_WIDTH / _IN_ROW - _HOP
        parts.append(_box(r, s, replica, x, y, width, cluster, estimates))
        x += width
        if s + 1 < len(replica.stages):
            parts.append(_hop(r, s, replica, x, y, cluster, estimates))
            x += _HOP
    return "".join(parts)


def _box(
    r: int,
    s: int,
    replica: Replica,
    x: float,
    y: float,
    width: float,
    cluster: Cluster,
    estimates: Estimates,
) -> str:
    stage = replica.stages[s]
    shape = stage.shape
    gpu = cluster.node_of(stage.devices[0]).gpu_type.name
    ends = [
        words
        for words, holds in (("embedding", s == 0), ("head", s == len(replica.stages) - 1))
        if holds
    ]
    time = f"{format_duration(estimates.stage_times_s[r][s])} per micro-batch"
    name = f"stage {s}: {count(shape.num_layers, 'layer')}"
    whole = name + "".join(f" + {end}" for end in ends)

    def fits(words: str) -> bool:
        return fitted(words, width - 16, 12) == words

    lines = (
        (whole if fits(whole) else name, "cell-name"),
        (f"{shape.tensor_parallel} x {gpu}", "cell-text"),
        (devices_by_node(stage.devices), "cell-text"),
        (time if fits(time) else time.partition(" per")[0], "cell-text"),
    )
    return (
        rect(x, y, width, _HEIGHT, stage_class(r, s), rx=6, title=" / ".join(w for w, _ in lines))
        + rect(x, y, 5, _HEIGHT, f"p{r % NUM_COLORS}", rx=2)
        + "".join(
            text(x + 13, y + 17 + 16 * i, fitted(words, width - 16, 11.5), kind)
            for i, (words, kind) in enumerate(lines)
        )
    )


def _hop(
    r: int, s: int, replica: Replica, x: float, y: float, cluster: Cluster, estimates: Estimates
) -> str:
    a, b = (cluster.device_by_name[replica.stages[i].devices[0]] for i in (s, s + 1))
    link = cluster.link(a, b)
    middle, height = x + _HOP / 2, y + _HEIGHT / 2
    head = f"{x + _HOP - 4},{height} {x + _HOP - 11},{height - 4} {x + _HOP - 11},{height + 4}"
    return (
        line(x + 4, height, x + _HOP - 10, height, "arrow")
        + f'<polygon class="arrow-head" points="{head}"/>'
        + text(middle, height - 8, format_bandwidth(link.bytes_per_s), "tiny", anchor="middle")
        + text(middle, height + 17, format_duration(estimates.boundary_times_s[r][s]), "tiny",
               anchor="middle")
    )  # fmt: skip
