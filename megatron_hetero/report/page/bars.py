"""Bars: memory of each stage, where the time goes, this plan beside others, what if."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.cluster.names import device_place
from megatron_hetero.plan.checks.violation import stages
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.advise.explain import Explanation
from megatron_hetero.report.content import Content
from megatron_hetero.report.page.figure import (
    PAGE_WIDTH,
    Figure,
    fitted,
    legend,
    line,
    rect,
    text,
    text_width,
)
from megatron_hetero.report.page.folding import folded, label, span
from megatron_hetero.report.what_if import Variation
from megatron_hetero.schedule.simulator.step import StepSimulation
from megatron_hetero.schedule.simulator.timelines import StageTimeline
from megatron_hetero.units import format_bytes, format_duration

GIB = 1 << 30
# Bars of links; widths in user units of the words on both sides.
_MAX_LINKS = 8
_LABELS, _VALUES = 300.0, 150.0
_ROOM = PAGE_WIDTH - _LABELS - _VALUES
PARTS = ("weights", "gradients", "optimizer", "activations", "buffers", "libraries", "reserve")


def memory_bars(content: Content) -> Figure:
    """Draw a bar for each stage: the predicted peak of its fullest GPU by cause, beside its
    capacity."""
    devices = content.estimates.devices
    # All bars share one scale: the largest card.
    largest = max(device.capacity_bytes for device in devices.values())
    rows = [
        (r, s, max(stage.devices, key=lambda d: devices[d].used_part))
        for r, s, stage in stages(content.plan)
    ]

    def kind(row: tuple[int, int, str]) -> tuple[str, int]:
        return content.cluster.node_of(row[2]).gpu_type.name, devices[row[2]].capacity_bytes

    def drawn(row: tuple[int, int, str]) -> tuple[float, ...]:
        return tuple(devices[row[2]].parts_bytes.get(part, 0) / largest for part in PARTS)

    # Stages that look alike share a bar.
    shown_rows = folded(rows, kind, drawn)
    height, step = (18.0, 26.0) if len(shown_rows) <= 24 else (11.0, 15.0)
    shown = legend(tuple((part, part) for part in PARTS), 0, 14)
    parts = [shown]
    y = 32.0
    for row in shown_rows:
        # The label: how full the GPU is, or the span over a bar's stages.
        r, s, fullest = row.first
        device = devices[fullest]
        gpu, capacity_bytes = kind(row.first)
        peaks = [devices[name].used_bytes for *_, name in row.rows]
        part = span([peak / capacity_bytes for peak in peaks], "{:.0%}".format)
        words = f"of {capacity_bytes / GIB:.1f} GiB"
        words = f"{part} {words}" if row.num_more else f"{peaks[0] / GIB:.1f} {words} ({part})"
        name = label(f"R{r} stage {s}", row.num_more, f": {gpu}", _LABELS)
        parts.append(text(0, y + height - 4, name, "small"))
        # The bar: the capacity, and on it the parts of the peak.
        scale = _ROOM / largest
        x = _LABELS
        parts.append(rect(x, y, device.capacity_bytes * scale, height, "room"))
        for part in PARTS:
            width = device.parts_bytes.get(part, 0) * scale
            title = f"{part}: {device.parts_bytes.get(part, 0) / GIB:.2f} GiB"
            parts.append(rect(x, y, width, height, part, title=title))
            x += width
        end = _LABELS + device.capacity_bytes * scale
        parts.append(line(end, y - 2, end, y + height + 2, "limit"))
        parts.append(text(PAGE_WIDTH, y + height - 4, words, "small", anchor="end"))
        y += step
    return Figure("memory", "Predicted memory of each stage's fullest GPU", y + 4, "".join(parts))


def time_bar(explanation: Explanation) -> Figure:
    """Draw the step of the slowest stage, by cause."""
    causes = explanation.time_by_cause
    rows = (
        ("forward", "computing", causes.compute_s),
        ("backward", "tensor-parallel communication", causes.tensor_parallel_s),
        ("buffers", "first and last hops", causes.boundary_s),
        ("wait", "waiting for other stages", causes.waiting_s),
        ("gradient_sync", "gradient exchange", causes.gradient_sync_s),
        ("step", "optimizer", causes.update_s),
    )
    # The whole step is the width of the page.
    total = sum(seconds for *_, seconds in rows)
    parts: list[str] = []
    x = 0.0
    for kind, words, seconds in rows:
        width = PAGE_WIDTH * seconds / total
        parts.append(rect(x, 0, width, 34, kind, title=f"{words}: {format_duration(seconds)}"))
        # The share stands in its part only if it fits.
        share = f"{seconds / total:.0%}"
        if width > text_width(share, 13) + 8:
            color = "label" if kind == "wait" else "on-bar"
            parts.append(text(x + width / 2, 22, share, color, anchor="middle"))
        x += width
    # The legend: entries in rows as wide as the page; causes without time are left out.
    x, y = 0.0, 58.0
    for kind, words, seconds in rows:
        entry = f"{words} {format_duration(seconds)}"
        if seconds <= 0:
            continue
        if x + 18 + text_width(entry, 12) > PAGE_WIDTH:
            x, y = 0.0, y + 22
        parts.append(legend(((kind, entry),), x, y))
        x += 18 + text_width(entry, 12) + 24
    return Figure("time", "Where the time of a step goes", y + 12, "".join(parts))


def busy_bars(plan: Plan, simulation: StepSimulation) -> Figure:
    """Draw the part of the step in which the GPUs of each stage compute."""

    def part_of(stage: StageTimeline) -> float:
        return stage.busy_s / simulation.step_time_s

    # Stages with as many GPUs that are as busy share a bar.
    rows = folded(
        simulation.timelines, lambda stage: len(stage.devices), lambda stage: (part_of(stage),)
    )
    height, step = (16.0, 23.0) if len(rows) <= 24 else (10.0, 14.0)
    parts: list[str] = []
    y = 6.0
    for row in rows:
        stage = row.first
        nodes = ", ".join(dict.fromkeys(device_place(d)[0] for d in stage.devices))
        gpus = f"{len(stage.devices)} GPUs of {nodes}"
        if len(stage.devices) == 1:
            gpus = stage.devices[0]
        place = f"R{stage.replica} stage {stage.stage}"
        name = label(place, row.num_more, "" if row.num_more else f": {gpus}", _LABELS - 8)
        parts.append(text(0, y + height - 3, name, "small"))
        parts.append(rect(_LABELS, y, _ROOM, height, "lane"))
        parts.append(rect(_LABELS, y, _ROOM * part_of(stage), height, f"p{stage.replica % 8}"))
        words = f"{span(list(map(part_of, row.rows)), '{:.0%}'.format)} computing"
        parts.append(text(_LABELS + _ROOM + 10, y + height - 3, words, "small"))
        y += step
    return Figure("busy", "How busy each stage is", y + 2, "".join(parts))


def link_bars(simulation: StepSimulation) -> Figure | None:
    """Draw the busiest paths of the cluster; return None where no message leaves a GPU."""
    busiest = sorted(simulation.links, key=lambda link: -link.busy_s)[:_MAX_LINKS]
    parts: list[str] = []
    y = 2.0
    for link in busiest:
        part = link.busy_s / simulation.step_time_s
        parts.append(text(0, y + 13, fitted(link.name, _LABELS - 8, 12), "small"))
        parts.append(rect(_LABELS, y, _ROOM, 16, "lane"))
        parts.append(rect(_LABELS, y, _ROOM * min(part, 1.0), 16, "optimizer"))
        words = f"{part:.1%}, {format_bytes(link.num_bytes)}"
        parts.append(text(_LABELS + _ROOM + 10, y + 13, words, "small"))
        y += 23
    if not busiest:
        return None
    return Figure("links", "How busy the busiest paths are", y + 2, "".join(parts))


def comparison_bars(content: Content) -> Figure:
    """Draw step times: the lower bound, this plan, stock Megatron's best, the next best plans."""
    explanation, estimates = content.explanation, content.estimates
    # Rows: (class of the bar, name, seconds).
    rows: list[tuple[str, str, float]] = []
    if estimates.bound_s is not None:
        is_of_all = estimates.bound_with_context_parallel_s is None
        words = "no plan can be faster than" if is_of_all else "lower bound (see below)"
        rows.append(("bound", words, estimates.bound_s))
    rows.append(("this", "this plan", explanation.step_time_s))
    # Stock Megatron first, then the next best plans, then those of strategies by hand.
    others = [
        *([("stock Megatron's best", explanation.best_stock)] if explanation.best_stock else []),
        *((f"next best {i}", other) for i, other in enumerate(explanation.runners_up, start=1)),
        *((other.strategy, other) for other in explanation.by_hand),
    ]
    rows += [("other", name, other.step_time_s) for name, other in others]
    # The slowest plan fills the width.
    longest = max(seconds for *_, seconds in rows)
    parts: list[str] = []
    y = 2.0
    for kind, words, seconds in rows:
        parts.append(text(0, y + 15, fitted(words, _LABELS - 8, 13), "label"))
        parts.append(rect(_LABELS, y, _ROOM * seconds / longest, 20, kind, rx=3))
        beside = format_duration(seconds)
        if kind == "other":
            beside += f" ({seconds / explanation.step_time_s - 1:+.0%})"
        parts.append(text(_LABELS + _ROOM * seconds / longest + 8, y + 15, beside, "small"))
        y += 28
    return Figure("comparison", "Step times side by side", y, "".join(parts))


def what_if_bars(found: Sequence[Variation]) -> Figure:
    """Draw the change of the step time under each variation, around a middle line."""
    # At least 2 %, so that tiny changes do not look large.
    largest = max(max(abs(v.change) for v in found), 0.02)
    label = 480.0
    middle = label + (PAGE_WIDTH - label) / 2
    scale = (PAGE_WIDTH - label) / 2 - 60
    parts: list[str] = []
    y = 2.0
    for variation in found:
        width = scale * abs(variation.change) / largest
        slower = variation.change > 0
        parts.append(text(0, y + 15, fitted(variation.what, label - 8, 13), "label"))
        # Slower goes to the right of the middle line, faster to the left; the words follow the bar.
        if width >= 0.5:
            x = middle if slower else middle - width
            parts.append(rect(x, y + 2, width, 17, "slower" if slower else "faster", rx=2))
        words = f"{variation.change:+.1%}" if abs(variation.change) >= 0.0005 else "no change"
        x = middle + width + 6 if slower or width < 0.5 else middle - width - 6
        anchor = "start" if slower or width < 0.5 else "end"
        parts.append(text(x, y + 15, words, "small", anchor=anchor))
        y += 26
    parts.append(line(middle, 0, middle, y, "grid"))
    return Figure("what-if", "Step time under small changes", y + 2, "".join(parts))
