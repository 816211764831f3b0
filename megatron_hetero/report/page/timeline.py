"""Operations of every stage as lanes over one axis of time.

Few operations are drawn one by one, with their micro-batch; many become one path for each lane and
kind, so that hundreds of micro-batches on 64 stages stay a page that opens at once.  Of many lanes
those that look alike are one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median

from megatron_hetero.cluster.names import device_place
from megatron_hetero.report.content import Lane, LaneGroup
from megatron_hetero.report.page.figure import (
    PAGE_WIDTH,
    Figure,
    legend,
    line,
    number,
    rect,
    text,
    ticks,
)
from megatron_hetero.report.page.folding import Folded, folded, label
from megatron_hetero.schedule.parts import OpSpan
from megatron_hetero.units import format_duration

_LABELS = 190.0
_MAX_SINGLE = 3000
"""Operations in a figure that still get a shape and a tooltip each."""
_MIN_NUMBERED = 15.0
"""Least width of an operation drawn with the number of the micro-batch."""
_CLOSE_UP_WIDTH = 20.0
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward (inputs)",
    "backward_weight": "backward (weights)",
    "gradient_sync": "gradient exchange",
    "step": "optimizer",
    "weight_sync": "new weights",
}


def timeline(groups: Sequence[LaneGroup]) -> Figure:
    """Draw the whole step; several groups share one axis."""
    end_s = max(group.step_time_s for group in groups)
    return _figure("timeline", groups, 0.0, end_s, "One step of training")


def close_up(groups: Sequence[LaneGroup]) -> Figure | None:
    """Draw the beginning of the step, wide enough to read; return None where the whole step is that
    already."""
    end_s = max(group.step_time_s for group in groups)
    # Passes alone: exchanges and updates have no micro-batch.
    computing_s = [
        o.end_s - o.start_s
        for group in groups
        for lane in group.lanes
        for o in lane.operations
        if o.micro_batch >= 0
    ]
    # So long that a usual pass is `_CLOSE_UP_WIDTH` units wide.
    window_s = median(computing_s) * (PAGE_WIDTH - _LABELS) / _CLOSE_UP_WIDTH
    if window_s > 0.6 * end_s:
        return None
    return _figure("close-up", groups, 0.0, window_s, "The beginning of the step")


def _figure(
    name: str, groups: Sequence[LaneGroup], start_s: float, end_s: float, alt: str
) -> Figure:
    # Only operations that the window shows, and rows of those that look alike.
    groups = [replace(group, lanes=tuple(_within(group.lanes, start_s, end_s))) for group in groups]
    rows = [folded(group.lanes, _num_devices, partial(_drawn, end_s=end_s)) for group in groups]
    num_rows = sum(map(len, rows))
    # Lower lanes the more there are.
    height = 24.0 if num_rows <= 12 else 17.0 if num_rows <= 32 else 11.0
    view = _View(start_s, end_s, height)
    # Many operations: a path for each kind in place of a shape for each operation.
    shown = [o for lanes in rows for lane in lanes for o in lane.first.operations]
    single = len(shown) <= _MAX_SINGLE
    kinds = tuple((k, words) for k, words in KINDS.items() if any(o.kind == k for o in shown))
    parts = [legend((*kinds, ("wait", "waiting")), 0, 14)]
    y = 34.0
    for group, lanes in zip(groups, rows, strict=True):
        title = f"{group.title}: {format_duration(group.step_time_s)} a step"
        parts.append(text(0, y + 12, title, "strong"))
        y += 22
        top = y
        # A gap between replicas.
        for i, lane in enumerate(lanes):
            if i and lane.first.replica != lanes[i - 1].first.replica:
                y += 6
            parts.append(_lane(lane, y, view, single))
            y += height + (3 if height > 12 else 1)
        parts.append(_axis(view, top, y))
        y += 30
    return Figure(name, f"{alt}: {', '.join(g.title for g in groups)}", y, "".join(parts))


class _View:
    """The map from seconds to the drawing."""

    def __init__(self, start_s: float, end_s: float, lane_height: float) -> None:
        self.start_s, self.end_s, self.lane_height = start_s, end_s, lane_height
        self.scale = (PAGE_WIDTH - _LABELS) / (end_s - start_s)

    def x(self, time_s: float) -> float:
        """Return the coordinate of a moment, kept inside the figure."""
        inside = min(max(time_s, self.start_s), self.end_s)
        return _LABELS + (inside - self.start_s) * self.scale


def _within(lanes: Sequence[Lane], start_s: float, end_s: float) -> Iterator[Lane]:
    """Keep the operations of a part of the step in each lane."""
    for lane in lanes:
        shown = (o for o in lane.operations if o.start_s < end_s and o.end_s > start_s)
        yield replace(lane, operations=tuple(shown))


def _num_devices(lane: Lane) -> int:
    return len(lane.devices)


def _drawn(lane: Lane, end_s: float) -> tuple[float, ...]:
    """Return where the operations of each kind begin and end and how much they fill, in steps."""
    found: list[float] = []
    # Begin, end and sum of each kind; a kind that is missing begins and ends with the step.
    for kind in KINDS:
        spans = [(o.start_s, o.end_s) for o in lane.operations if o.kind == kind]
        found.append(min((start for start, _ in spans), default=end_s))
        found.append(max((end for _, end in spans), default=end_s))
        found.append(sum(end - start for start, end in spans))
    return tuple(seconds / end_s for seconds in found)


def _lane(row: Folded[Lane], y: float, view: _View, single: bool) -> str:
    lane, height = row.first, view.lane_height
    size = 12 if height > 14 else 9
    nodes = ", ".join(dict.fromkeys(device_place(d)[0] for d in lane.devices))
    place = f"R{lane.replica} stage {lane.stage}"
    of = "" if row.num_more else f"  {nodes}"
    words = label(place, row.num_more, of, _LABELS - 8, size)
    parts = [
        text(0, y + height / 2 + size / 3, words, "small" if size == 12 else "on-lane"),
        rect(_LABELS, y, PAGE_WIDTH - _LABELS, height, "lane"),
    ]
    # One shape an operation, or one path a kind.
    shown = lane.operations
    if single:
        parts += [_operation(o, y, view) for o in shown]
    else:
        for kind in KINDS:
            path = "".join(_path(o, y, view) for o in shown if o.kind == kind)
            if path:
                parts.append(f'<path class="{kind}" d="{path}"/>')
    return "".join(parts)


def _operation(operation: OpSpan, y: float, view: _View) -> str:
    x, width = view.x(operation.start_s), view.x(operation.end_s) - view.x(operation.start_s)
    # White between neighbours, if the operation is wide enough.
    gap = 0.8 if width > 4 else 0.0
    what = KINDS[operation.kind]
    if operation.micro_batch >= 0:
        what += f" of micro-batch {operation.micro_batch}"
    if operation.chunk:
        what += f", chunk {operation.chunk}"
    duration = format_duration(operation.end_s - operation.start_s)
    title = f"{what}: {duration}, from {format_duration(operation.start_s)}"
    shape = rect(x, y, width - gap, view.lane_height, operation.kind, title=title)
    # The number only where it can be read.
    if operation.micro_batch >= 0 and width >= _MIN_NUMBERED and view.lane_height > 14:
        color = "on" if operation.kind == "forward" else "on-light"
        shape += text(x + (width - gap) / 2, y + view.lane_height / 2 + 3.5,
                      str(operation.micro_batch), color, anchor="middle")  # fmt: skip
    return shape


def _path(operation: OpSpan, y: float, view: _View) -> str:
    x, width = view.x(operation.start_s), view.x(operation.end_s) - view.x(operation.start_s)
    gap = 0.5 if width > 2 else 0.0
    # Close the path without a fourth side: fewer characters for thousands of operations.
    return f"M{number(x)} {number(y)}h{width - gap:.2f}v{number(view.lane_height)}H{number(x)}z"


def _axis(view: _View, top: float, bottom: float) -> str:
    parts = []
    for tick in ticks(view.end_s - view.start_s):
        x = view.x(view.start_s + tick)
        parts.append(line(x, top, x, bottom + 3, "grid tick"))
        parts.append(text(x, bottom + 16, _seconds(view.start_s + tick), "tiny", anchor="middle"))
    return "".join(parts)


def _seconds(time_s: float) -> str:
    return "0" if time_s == 0 else format_duration(time_s)
