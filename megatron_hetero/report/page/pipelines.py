"""The replicas as pipelines: a box for each stage, wide as its layers, and the hops between.

Of many stages neighbours on a node that are alike share a box, and replicas that are alike a row.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from megatron_hetero.cluster.spec import Cluster
from megatron_hetero.plan.estimates import Estimates
from megatron_hetero.plan.plan import Plan, Replica
from megatron_hetero.report.page.cluster_map import NUM_COLORS, stage_class
from megatron_hetero.report.page.figure import (
    PAGE_WIDTH,
    Figure,
    fitted,
    line,
    rect,
    text,
    text_width,
)
from megatron_hetero.report.page.folding import MAX_ROWS, Folded, folded, runs
from megatron_hetero.report.text.words import count, devices_by_node, ranges
from megatron_hetero.units import format_bandwidth, format_duration

_HOP, _HEIGHT, _TITLE, _MIN_BOX = 76.0, 74.0, 26.0, 118.0
_IN_ROW = 5
"""Boxes side by side; longer pipelines go on in the next row."""

type _Stages = Sequence[Folded[int]]
"""The boxes of a replica, each with the numbers of its stages."""


def pipelines(plan: Plan, cluster: Cluster, estimates: Estimates) -> Figure:
    """Draw one row (or more) for each replica."""
    # Many stages: replicas alike share a row, and stages alike a box.
    total = sum(replica.num_micro_batches for replica in plan.replicas)
    is_many = sum(len(replica.stages) for replica in plan.replicas) > MAX_ROWS
    slowest_s = max(estimates.replica_times_s)

    def kind(r: int) -> Hashable:
        replica = plan.replicas[r]
        stages = (_stage_kind(replica, cluster, s) for s in range(len(replica.stages)))
        return replica.num_micro_batches, replica.micro_batch_size, *stages

    def drawn(r: int) -> tuple[float, ...]:
        return (estimates.replica_times_s[r] / slowest_s,)

    parts: list[str] = []
    y = 0.0
    most = 0 if is_many else len(plan.replicas)
    for row in folded(range(len(plan.replicas)), kind, drawn, most):
        r = row.first
        replica = plan.replicas[r]
        # The title of a replica, or of replicas alike.
        part = replica.num_micro_batches / total
        name = f"Replicas {ranges(list(row.rows))}" if row.num_more else f"Replica {r}"
        parts.append(text(0, y + 15, name, "strong"))
        words = f"{replica.num_micro_batches} of {total} micro-batches a step ({part:.0%})"
        if replica.micro_batch_size is not None:
            words += f", {replica.micro_batch_size} sequences each"
        words += f"; its pipeline takes {format_duration(estimates.replica_times_s[r])}"
        if row.num_more:
            words = f"alike; each: {words}"
        parts.append(text(max(80.0, text_width(name, 14) + 8), y + 15, words, "small"))
        y += _TITLE
        # Its stages as boxes, in rows of at most `_IN_ROW`.
        boxes = _boxes(r, replica, cluster, estimates, is_many)
        for start in range(0, len(boxes), _IN_ROW):
            parts.append(_row(r, replica, boxes, start, y, cluster, estimates))
            y += _HEIGHT + 10
        y += 10
    return Figure("pipelines", f"{len(plan.replicas)} pipelines", y, "".join(parts))


def _stage_kind(replica: Replica, cluster: Cluster, s: int) -> Hashable:
    stage = replica.stages[s]
    # The first GPU stands for the tensor-parallel group.
    gpu = cluster.node_of(stage.devices[0]).gpu_type.name
    return stage.shape.num_layers, stage.shape.tensor_parallel, gpu


def _boxes(
    r: int, replica: Replica, cluster: Cluster, estimates: Estimates, is_many: bool
) -> _Stages:
    """Draw the boxes of a replica's stages: of many, neighbours on one node that are alike share
    one.

    The first and the last stage stand alone, since they have weights that the others have not.
    """
    times_s = estimates.stage_times_s[r]
    last = len(replica.stages) - 1

    def kind(s: int) -> Hashable:
        node = cluster.node_of(replica.stages[s].devices[0]).name
        return s == 0, s == last, node, _stage_kind(replica, cluster, s)

    def drawn(s: int) -> tuple[float, ...]:
        return (times_s[s] / max(times_s),)

    stages = range(last + 1)
    return runs(stages, kind, drawn) if is_many else [Folded((s,)) for s in stages]


def _row(
    r: int,
    replica: Replica,
    boxes: _Stages,
    start: int,
    y: float,
    cluster: Cluster,
    estimates: Estimates,
) -> str:
    # The last box of a row has a hop behind it too, unless the pipeline ends there.
    shown = boxes[start : start + _IN_ROW]
    num_hops = len(shown) - (shown[-1] is boxes[-1])
    room = PAGE_WIDTH - _HOP * num_hops
    # Widths of boxes: a least one, and a part of the free room by layers.
    layers = [sum(replica.stages[s].shape.num_layers for s in box.rows) for box in shown]
    free = room - _MIN_BOX * len(layers)
    long = len(boxes) > _IN_ROW  # then the boxes of all rows stand below each other
    parts: list[str] = []
    x = 0.0
    for box, num_layers in zip(shown, layers, strict=True):
        width = _MIN_BOX + free * num_layers / sum(layers)
        if long:
            width = PAGE_WIDTH / _IN_ROW - _HOP
        parts.append(_box(r, box, replica, x, y, width, cluster, estimates))
        x += width
        if box is not boxes[-1]:
            parts.append(_hop(r, box.rows[-1], replica, x, y, cluster, estimates))
            x += _HOP
    return "".join(parts)


def _box(
    r: int,
    box: Folded[int],
    replica: Replica,
    x: float,
    y: float,
    width: float,
    cluster: Cluster,
    estimates: Estimates,
) -> str:
    s = box.first
    stage = replica.stages[s]
    shape = stage.shape
    gpu = cluster.node_of(stage.devices[0]).gpu_type.name
    # Lines of words in the box; the first has the longest form that fits.
    ends = [
        words
        for words, holds in (("embedding", s == 0), ("head", s == len(replica.stages) - 1))
        if holds
    ]
    slowest_s = max(estimates.stage_times_s[r][each] for each in box.rows)
    time = f"{format_duration(slowest_s)} per micro-batch"
    layers = count(shape.num_layers, "layer")
    # Forms of the name, the longest first.
    names = [f"stage {s}: {layers}"]
    if box.num_more:
        which = f"{s}-{box.rows[-1]}"
        names = [f"stages {which}: {layers} each", f"{which}: {layers} each"]
        names.append(f"{which}: {shape.num_layers} each")
    names.insert(0, names[0] + "".join(f" + {end}" for end in ends))

    def fits(words: str) -> bool:
        return fitted(words, width - 16, 12) == words

    lines = (
        (next(filter(fits, names), names[-1]), "cell-name"),
        (f"{shape.tensor_parallel} x {gpu}", "cell-text"),
        (
            devices_by_node([d for each in box.rows for d in replica.stages[each].devices]),
            "cell-text",
        ),
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
    # First GPUs of both stages tell the link; the time is that of a micro-batch's activation.
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
