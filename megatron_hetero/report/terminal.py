"""A plan as text for a terminal of 80 to 100 columns, in colour and without.

Every function returns something that `rich` prints; none prints.  Colour only underlines what the
words say already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.plan.check_schedule import launched_forwards
from megatron_hetero.plan.chunks import layer_ranges, stage_chunks
from megatron_hetero.plan.diff import Difference
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import DeviceEstimate, Estimates, Plan, Stage
from megatron_hetero.units import format_duration

GIB = 1 << 30
TIGHT_MEMORY = 0.9
"""A device whose predicted peak is above this part of its memory is shown in yellow."""
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
STAGE_LEGEND = "time: one micro-batch forward and backward; memory: the stage's fullest GPU"
RECOMPUTE_COLUMN: tuple[str, Literal["left", "right"]] = ("recompute", "left")
AHEAD_LEGEND = "ahead: forwards before the first backward, which hide slow hops"
MAX_KEY_WIDTH = 32
"""Places and names in a table of differences are not wrapped up to this many columns: two of them
leave 16 of 80."""
MIN_NAMES_WIDTH = 11
"""Names of GPUs wrap before any number is cut, down to this many columns."""
NOT_MEASURED = "predicted from the catalogue and an analytic model, not measured"


def plan_report(plan: Plan) -> RenderableType:
    """The whole plan: speed, replicas, idle GPUs, layout."""
    return Group(
        *plan_heading(plan),
        Text(),
        *replica_tables(plan),
        *idle_lines(plan),
        layout_line(plan),
    )


def plan_heading(plan: Plan) -> tuple[RenderableType, ...]:
    """What was planned, and how fast it is predicted to be."""
    lines: list[RenderableType] = []
    if plan.workload is not None:
        model, training = plan.workload.model, plan.workload.training
        lines.append(
            facts(
                ("model", plan.workload.source),
                (
                    "",
                    f"{model.num_layers} layers, hidden {model.hidden_size}, "
                    f"sequence {model.seq_length}, {training.precision}"
                    f"{' with fp8 products, timed as bf16' if training.fp8 else ''}; "
                    f"global batch {training.global_batch_size}",
                ),
                ("devices", _device_count(plan)),
                *_schedule(plan),
            )
        )
    if plan.estimates is not None:
        lines.append(facts(*_speed(plan.estimates)))
    return tuple(lines)


def _schedule(plan: Plan) -> Iterator[tuple[str, str]]:
    """What stages compute when, where that is not 1F1B."""
    chunks = max(len(stage_chunks(stage)) for r in plan.replicas for stage in r.stages)
    if chunks > 1:
        yield "schedule", f"{plan.schedule}, up to {chunks} chunks of layers on a stage"
    elif plan.schedule != "1f1b":
        yield "schedule", plan.schedule


def facts(*rows: tuple[str, str]) -> Table:
    """Names in one column, values in the next."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", min_width=12)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def replica_tables(plan: Plan) -> Iterator[RenderableType]:
    """For each replica a title and a table, with one row for each stage.

    The columns of all tables have the same widths, so that replicas compare at a glance.  Times are
    forward and backward of one micro-batch; memory is that of the stage's fullest device.
    """
    rows = [
        [_stage_row(plan, r, s) for s in range(len(replica.stages))]
        for r, replica in enumerate(plan.replicas)
    ]
    columns = list(STAGE_COLUMNS if plan.estimates is not None else STAGE_COLUMNS[:4])
    if _launches_ahead(plan):
        columns.insert(4, AHEAD_COLUMN)
    if _recomputes_by_stage(plan):
        columns.insert(4, RECOMPUTE_COLUMN)
    widths = [
        max(len(heading), *(len(row[c]) for replica_rows in rows for row in replica_rows))
        for c, (heading, _) in enumerate(columns)
    ]
    for r, replica_rows in enumerate(rows):
        yield _replica_title(plan, r)
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
        for (heading, justify), width in zip(columns, widths, strict=True):
            if heading == "GPUs":
                # Padded, so that it is as wide in every table; yet it wraps when space is short.
                table.add_column(heading.ljust(width), min_width=MIN_NAMES_WIDTH)
            else:
                table.add_column(heading, justify=justify, no_wrap=True, min_width=width)
        for row in replica_rows:
            table.add_row(*row)
        yield Padding(table, (0, 0, 1, 1))
    if plan.estimates is not None:
        legends = [STAGE_LEGEND, AHEAD_LEGEND] if _launches_ahead(plan) else [STAGE_LEGEND]
        yield Text("\n".join(legends) + "\n", style="dim")


def _replica_title(plan: Plan, replica_index: int) -> Text:
    replica = plan.replicas[replica_index]
    title = Text.assemble(
        (f"Replica {replica_index}", "bold"),
        f"  {count(replica.num_micro_batches, 'micro-batch', 'micro-batches')} a step",
    )
    if replica.micro_batch_size is not None:
        title.append(f" of {count(replica.micro_batch_size, 'sequence')}")
    if plan.estimates is not None:
        title.append(f", {format_duration(plan.estimates.replica_times_s[replica_index])}")
    return title


def _stage_row(plan: Plan, replica_index: int, stage_index: int) -> list[Text]:
    stage = plan.replicas[replica_index].stages[stage_index]
    row = [
        Text(str(stage_index)),
        Text(_gpus(plan, stage)),
        Text(_width(stage)),
        Text(_layers(stage)),
    ]
    if _recomputes_by_stage(plan):
        row.append(Text(_recompute(plan, stage)))
    if _launches_ahead(plan):
        row.append(Text(str(launched_forwards(plan, replica_index, stage_index))))
    if plan.estimates is not None:
        time_s = plan.estimates.stage_times_s[replica_index][stage_index]
        row.append(Text(format_duration(time_s)))
        is_crammed = _recomputes_by_stage(plan) and _launches_ahead(plan)
        row.append(_memory(_fullest(stage.devices, plan.estimates), is_crammed))
    return row


def _launches_ahead(plan: Plan) -> bool:
    return any(s.num_launched_forwards is not None for r in plan.replicas for s in r.stages)


def _recomputes_by_stage(plan: Plan) -> bool:
    return any(s.recompute is not None for r in plan.replicas for s in r.stages)


def _recompute(plan: Plan, stage: Stage) -> str:
    """What a stage computes again in its backward pass: `full`, `3 of 9`, `none`."""
    own = None if plan.workload is None else plan.workload.training.recompute
    if stage.recompute_num_layers is not None:
        return f"{stage.recompute_num_layers} of {stage.shape.num_layers}"
    return stage.recompute or own or "the job's"


def idle_lines(plan: Plan) -> Iterable[RenderableType]:
    """The GPUs that the plan does not use, and why."""
    if not plan.idle_devices:
        return
    yield Text("Idle GPUs", style="bold")
    by_reason: dict[str, list[str]] = {}
    for device in plan.idle_devices:
        by_reason.setdefault(plan.idle_reasons.get(device, "no reason recorded"), []).append(device)
    for reason, devices in by_reason.items():
        yield Text(f"  {devices_by_node(devices)}: {reason}", style="yellow")
    yield Text()


def layout_line(plan: Plan) -> Text:
    """The plan in one line, as `--hetero-layout` takes it."""
    return Text.assemble(("Layout  ", "bold"), (format_layout(plan.layout), "green"))


def difference_table(differences: Sequence[Difference]) -> Table:
    """One row for each difference: where, what, before, after."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("where", "what"):
        # Places and names of flags are kept whole, and the values wrap, unless space is too short.
        width = max((len(getattr(d, heading)) for d in differences), default=0)
        table.add_column(heading, overflow="fold", no_wrap=width <= MAX_KEY_WIDTH)
    table.add_column("before", overflow="fold")
    table.add_column("after", overflow="fold")
    for d in differences:
        table.add_row(
            d.where,
            d.what,
            Text("-" if d.before is None else d.before, style="red"),
            Text("-" if d.after is None else d.after, style="green"),
        )
    return table


def devices_by_node(devices: Sequence[str]) -> str:
    """`a:0 a:1 b:0` as `a: 0 1; b: 0`."""
    indices: dict[str, list[str]] = {}
    for device in devices:
        node, _, index = device.rpartition(":")
        indices.setdefault(node, []).append(index)
    return "; ".join(f"{node}: {' '.join(found)}" for node, found in indices.items())


def count(number: int, singular: str, plural: str = "") -> str:
    """`1 layer`, `2 layers`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def _speed(estimates: Estimates) -> Iterable[tuple[str, str]]:
    yield (
        "step time",
        f"{format_duration(estimates.step_time_s)}, {estimates.tokens_per_s:,.0f} tokens/s",
    )
    if estimates.bound_s is not None and estimates.gap is not None:
        bound = format_duration(estimates.bound_s)
        yield "lower bound", f"{bound}; this plan is within {estimates.gap:.1%} of it"
        if estimates.bound_relaxes:
            yield "", f"(the bound relaxes: {estimates.bound_relaxes})"
    if estimates.price_per_hour is not None and estimates.price_per_million_tokens is not None:
        yield (
            "price",
            f"{estimates.price_per_hour:,.2f} an hour, "
            f"{estimates.price_per_million_tokens:,.4g} for a million tokens",
        )
    if not estimates.measured:
        yield "basis", NOT_MEASURED


def _device_count(plan: Plan) -> str:
    used: dict[str, int] = {}
    for host in plan.hosts:
        used[host.gpu_type] = used.get(host.gpu_type, 0) + len(host.gpu_indices)
    kinds = " + ".join(f"{number} x {kind}" for kind, number in used.items())
    total = count(plan.layout.num_devices, "GPU")
    text = f"{total}: {kinds}" if kinds else f"{total}, none named"
    return f"{text}; {len(plan.idle_devices)} idle" if plan.idle_devices else text


def _gpus(plan: Plan, stage: Stage) -> str:
    if not stage.devices:
        return "any"
    nodes = {device.rpartition(":")[0] for device in stage.devices}
    kinds = sorted({host.gpu_type for host in plan.hosts if host.node in nodes})
    return f"{devices_by_node(stage.devices)} ({', '.join(kinds)})"


def _width(stage: Stage) -> str:
    shares = stage.shape.shares
    ratio = f" ({':'.join(map(str, shares))})" if shares else ""
    context = stage.shape.context_parallel
    groups = f" x cp{context}" if context > 1 else ""
    return f"{stage.shape.tensor_parallel}{ratio}{groups}"


def _layers(stage: Stage) -> str:
    return f"{layer_ranges(stage)} ({stage.shape.num_layers})"


def _fullest(devices: Sequence[str], estimates: Estimates) -> DeviceEstimate | None:
    known = [estimates.devices[device] for device in devices if device in estimates.devices]
    return max(known, key=lambda d: d.peak_bytes / d.capacity_bytes, default=None)


def _memory(device: DeviceEstimate | None, is_crammed: bool) -> Text:
    """`is_crammed`: so many columns that what is in use as bytes would not fit in 80."""
    if device is None:
        return Text("-")
    part = device.peak_bytes / device.capacity_bytes
    capacity = f"{device.capacity_bytes / GIB:.1f} GiB"
    if is_crammed:
        text = f"{part:.0%} of {capacity}"
    else:
        text = f"{device.peak_bytes / GIB:.1f} / {capacity} {part:4.0%}"
    style = "red" if part > 1 else "yellow" if part > TIGHT_MEMORY else ""
    return Text(text, style=style)
