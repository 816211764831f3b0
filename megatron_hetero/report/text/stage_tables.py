"""The replicas of a plan as tables for a terminal: a row for each stage, like ones together."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.plan.chunks import layer_ranges
from megatron_hetero.plan.estimates import DeviceEstimate, Estimates
from megatron_hetero.plan.in_flight import num_in_flight
from megatron_hetero.plan.plan import Plan, Stage
from megatron_hetero.report.text.words import GIB, MIN_ALIKE, count, devices_by_node, ranges
from megatron_hetero.units import format_duration

TIGHT_MEMORY = 0.9
"""Fraction of a device's memory above which the predicted peak is shown in yellow."""
STAGE_COLUMNS: tuple[tuple[str, Literal["left", "right"]], ...] = (
    ("stage", "right"),
    ("GPUs", "left"),
    ("TP", "right"),
    ("layers", "left"),
    ("time", "right"),
    ("memory", "right"),
)
AHEAD_COLUMN: tuple[str, Literal["left", "right"]] = ("ahead", "right")
"""Shown after the layers, if some stage has a launch count of its own."""
RECOMPUTE_COLUMN: tuple[str, Literal["left", "right"]] = ("recompute", "left")
STAGE_LEGEND = (
    "time: one micro-batch forward and backward; memory: in use on the stage's fullest GPU"
)
AHEAD_LEGEND = "ahead: the launch count, forwards before the first backward, which hide slow hops"
FOLDED_LEGEND = "of several stages or replicas in one row: the longest time, the fullest GPU"
MAX_TABLE_WIDTH = 79
"""Columns of a narrow terminal, less the indent of a table."""
_BETWEEN = 2
MIN_NAMES_WIDTH = 11
"""Names of GPUs wrap before any number is cut, down to this many columns."""
_NEAR = 0.02
"""Relative difference up to which two times count as alike."""


@dataclass(frozen=True)
class _StageRow:
    """A row of the table: `numbers` of the stages, and the `stages` themselves from all
    replicas."""

    numbers: tuple[int, ...]
    stages: tuple[Stage, ...]
    ahead: tuple[int, ...]
    time_s: float
    memory: DeviceEstimate | None


def replica_tables(plan: Plan) -> Iterator[RenderableType]:
    """Show each replica as a title and a table, with one row for each stage; replicas that are
    alike are one table, stages that are alike and follow each other one row.

    The columns of all tables have the same widths, so that replicas compare at a glance.  Times are
    forward and backward of one micro-batch; memory is that of the fullest device.
    """
    # Rows of every table first: all tables have the same columns and widths.
    groups = _replica_groups(plan)
    tables = [list(_rows(plan, group)) for group in groups]
    is_crammed = _recomputes_by_stage(plan) and _launches_ahead(plan)
    texts = [[_texts(plan, row, is_crammed) for row in rows] for rows in tables]
    columns = list(STAGE_COLUMNS if plan.estimates is not None else STAGE_COLUMNS[:4])
    if _launches_ahead(plan):
        columns.insert(4, AHEAD_COLUMN)
    if _recomputes_by_stage(plan):
        columns.insert(4, RECOMPUTE_COLUMN)
    widths = _widths(columns, texts)
    # Too wide with wrapped names: bytes in use give way to the part of the memory.
    needed = sum(width + _BETWEEN for width in (*widths[:1], MIN_NAMES_WIDTH, *widths[2:]))
    if needed - _BETWEEN > MAX_TABLE_WIDTH:
        texts = [[_texts(plan, row, True) for row in rows] for rows in tables]
        widths = _widths(columns, texts)
    for group, rows in zip(groups, texts, strict=True):
        yield _title(plan, group)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        for (heading, justify), width in zip(columns, widths, strict=True):
            if heading == "GPUs":
                # Padded, so that it is as wide in every table; yet it wraps when space is short.
                table.add_column(heading.ljust(width), min_width=MIN_NAMES_WIDTH)
            else:
                table.add_column(heading, justify=justify, no_wrap=True, min_width=width)
        for row in rows:
            table.add_row(*row)
        yield Padding(table, (0, 0, 1, 1))
    if plan.estimates is not None:
        legends = [STAGE_LEGEND, AHEAD_LEGEND] if _launches_ahead(plan) else [STAGE_LEGEND]
        if any(len(row.stages) > 1 for rows in tables for row in rows):
            legends.append(FOLDED_LEGEND)
        yield Text("\n".join(legends) + "\n", style="dim")


def _widths(
    columns: Sequence[tuple[str, str]], texts: Sequence[Sequence[Sequence[Text]]]
) -> list[int]:
    return [
        max(len(heading), *(len(row[c]) for rows in texts for row in rows))
        for c, (heading, _) in enumerate(columns)
    ]


def _replica_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Group the replicas by table: those that are alike together, where they are many."""
    # Same stages, layers and launch counts, as many micro-batches.
    alike: dict[Hashable, list[int]] = {}
    for r, replica in enumerate(plan.replicas):
        stages = tuple(
            (*_kind(plan, r, s), layer_ranges(stage), num_in_flight(plan, r, s))
            for s, stage in enumerate(replica.stages)
        )
        key = replica.num_micro_batches, replica.micro_batch_size, stages
        alike.setdefault(key, []).append(r)
    groups: list[tuple[int, ...]] = []
    # Few replicas, or ones with unlike times, keep tables of their own.
    for members in alike.values():
        if len(members) >= MIN_ALIKE and _are_near([_replica_time(plan, r) for r in members]):
            groups.append(tuple(members))
        else:
            groups += [(r,) for r in members]
    return sorted(groups)


def _rows(plan: Plan, group: Sequence[int]) -> Iterator[_StageRow]:
    """Yield the rows of a group of like replicas, each run of like stages as one row."""
    num_stages = len(plan.replicas[group[0]].stages)
    # Extend each run as long as stages are of one kind and their times near.
    start = 0
    while start < num_stages:
        kind = _kind(plan, group[0], start)
        stop = start + 1
        while stop < num_stages and _kind(plan, group[0], stop) == kind:
            times = [_stage_time(plan, group[0], s) for s in range(start, stop + 1)]
            if not _are_near(times):
                break
            stop += 1
        if stop - start < MIN_ALIKE:
            stop = start + 1
        yield _row(plan, group, range(start, stop))
        start = stop


def _row(plan: Plan, group: Sequence[int], numbers: Sequence[int]) -> _StageRow:
    # The row shows the longest time and the fullest GPU of all stages in it.
    places = [(r, s) for s in numbers for r in group]
    stages = tuple(plan.replicas[r].stages[s] for r, s in places)
    devices = [device for stage in stages for device in stage.devices]
    return _StageRow(
        tuple(numbers),
        stages,
        tuple(num_in_flight(plan, group[0], s) for s in numbers),
        max(_stage_time(plan, r, s) for r, s in places),
        None if plan.estimates is None else _fullest(devices, plan.estimates),
    )


def _kind(plan: Plan, r: int, s: int) -> tuple[Hashable, ...]:
    stage = plan.replicas[r].stages[s]
    recompute = _recompute(plan, stage)
    return _types(plan, stage.devices), _width(stage), stage.shape.num_layers, recompute


def _are_near(times_s: Sequence[float]) -> bool:
    return max(times_s) <= (1 + _NEAR) * min(times_s)


def _stage_time(plan: Plan, r: int, s: int) -> float:
    return 0.0 if plan.estimates is None else plan.estimates.stage_times_s[r][s]


def _replica_time(plan: Plan, r: int) -> float:
    return 0.0 if plan.estimates is None else plan.estimates.replica_times_s[r]


def _title(plan: Plan, group: Sequence[int]) -> Text:
    replica = plan.replicas[group[0]]
    name = f"Replicas {ranges(group)}" if len(group) > 1 else f"Replica {group[0]}"
    each = " each" if len(group) > 1 else ""
    batches = count(replica.num_micro_batches, "micro-batch", "micro-batches")
    title = Text.assemble((name, "bold"), f"  {batches}{each} a step")
    if replica.micro_batch_size is not None:
        title.append(f" of {count(replica.micro_batch_size, 'sequence')}")
    if plan.estimates is not None:
        title.append(f", {format_duration(max(_replica_time(plan, r) for r in group))}")
    return title


def _texts(plan: Plan, row: _StageRow, is_crammed: bool) -> list[Text]:
    stage = row.stages[0]
    devices = [device for stage in row.stages for device in stage.devices]
    layers = _layers(stage)
    # Layers of several stages: from the first one's first to the last one's last.
    if len(row.numbers) > 1:
        last = row.stages[-1]
        stop = last.first_layer + last.shape.num_layers - 1
        layers = f"{stage.first_layer}-{stop} ({stage.shape.num_layers} each)"
    texts = [
        Text(ranges(row.numbers)),
        Text(_gpus(plan, devices)),
        Text(_width(stage)),
        Text(layers),
    ]
    if _recomputes_by_stage(plan):
        texts.append(Text(_recompute(plan, stage)))
    if _launches_ahead(plan):
        least, most = min(row.ahead), max(row.ahead)
        texts.append(Text(f"{least}" if least == most else f"{most}-{least}"))
    if plan.estimates is not None:
        texts.append(Text(format_duration(row.time_s)))
        texts.append(_memory(row.memory, is_crammed))
    return texts


def _launches_ahead(plan: Plan) -> bool:
    return any(s.num_launched_forwards is not None for r in plan.replicas for s in r.stages)


def _recomputes_by_stage(plan: Plan) -> bool:
    return any(s.recompute is not None for r in plan.replicas for s in r.stages)


def _recompute(plan: Plan, stage: Stage) -> str:
    """Write the layers that a stage computes again in the backward pass: `full`, `3 of 9`,
    `none`."""
    own = None if plan.workload is None else plan.workload.training.recompute
    if stage.recompute_num_layers is not None:
        return f"{stage.recompute_num_layers} of {stage.shape.num_layers}"
    return stage.recompute or own or "the job's"


def _types(plan: Plan, devices: Sequence[str]) -> tuple[str, ...]:
    known = plan.type_by_device  # Empty in a plan that names no hosts.
    return tuple(sorted({known[device] for device in devices if device in known}))


def _gpus(plan: Plan, devices: Sequence[str]) -> str:
    if not devices:
        return "any"
    return f"{devices_by_node(devices)} ({', '.join(_types(plan, devices))})"


def _width(stage: Stage) -> str:
    # `2 (3:1) x cp2(5:3) ep 4 etp 2`: only what the stage has.
    shares = stage.shape.shares
    ratio = f" ({':'.join(map(str, shares))})" if shares else ""
    context = stage.shape.context_parallel
    of_sequences = stage.shape.context_shares
    parts = f"({':'.join(map(str, of_sequences))})" if of_sequences else ""
    groups = f" x cp{context}{parts}" if context > 1 else ""
    table = stage.shape.expert_shares
    experts = f" ep {':'.join(map(str, table))}" if table else ""
    if stage.shape.expert_groups is not None:
        experts = " ep {} etp {}".format(*stage.shape.expert_groups)
    return f"{stage.shape.tensor_parallel}{ratio}{groups}{experts}"


def _layers(stage: Stage) -> str:
    sharded = stage.shape.num_sharded_layers
    counted = f"{stage.shape.num_layers}, {sharded} sharded" if sharded else stage.shape.num_layers
    return f"{layer_ranges(stage)} ({counted})"


def _fullest(devices: Sequence[str], estimates: Estimates) -> DeviceEstimate | None:
    known = [estimates.devices[device] for device in devices if device in estimates.devices]
    return max(known, key=lambda d: d.used_part, default=None)


def _memory(device: DeviceEstimate | None, is_crammed: bool) -> Text:
    """Write a device's memory; `is_crammed`: there are too many columns for the bytes in use to fit
    in 80."""
    if device is None:
        return Text("-")
    part = device.used_part
    capacity = f"{device.capacity_bytes / GIB:.1f} GiB"
    if is_crammed:
        text = f"{part:.0%} of {capacity}"
    else:
        text = f"{device.used_bytes / GIB:.1f} / {capacity} {part:4.0%}"
    style = "red" if part > 1 else "yellow" if part > TIGHT_MEMORY else ""
    return Text(text, style=style)
