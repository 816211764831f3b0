"""A plan as text for a terminal of 80 to 100 columns, in colour and without.

Every function returns something that `rich` prints; none prints.  Colour only underlines what the
words say already.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_hetero.cost.utilization import MFU_MEANS, Utilization
from megatron_hetero.cost.work.calibration import shipped_calibration
from megatron_hetero.plan.chunks import stage_chunks
from megatron_hetero.plan.estimates import Estimates, TrafficEstimate
from megatron_hetero.plan.layout import format_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.planner.restrictions.mixture import mixture_words
from megatron_hetero.report.text.stage_tables import replica_tables
from megatron_hetero.report.text.words import count, devices_by_node, folded_layout
from megatron_hetero.schedule.stock import is_stock, sends_as_stock
from megatron_hetero.units import format_bytes, format_duration

GENERAL_MEANS = "a general efficiency, 4 to 12 % off where tables tell"
BOUND_IN_SHORT = " (of which plans: explain)"
FOLDED_LAYOUT = (
    "        N x (...): N equal replicas, for reading; --json, plan.json and `flags` have all of it"
)
NOT_MEASURED = "predicted from the catalogue and an analytic model, not measured"


def plan_report(
    plan: Plan, utilization: Utilization | None = None, *, in_full: bool = True
) -> RenderableType:
    """Show the whole plan: speed, replicas, idle GPUs, layout.

    Args:
        in_full: with what the lower bound covers and relaxes; else one line says where to read it.
    """
    return Group(
        *plan_heading(plan, utilization, in_full=in_full),
        Text(),
        *replica_tables(plan),
        *idle_lines(plan),
        layout_line(plan),
    )


def plan_heading(
    plan: Plan, utilization: Utilization | None = None, *, in_full: bool = True
) -> tuple[RenderableType, ...]:
    """Show the model, the training job and the predicted speed; `in_full` as of `plan_report`."""
    # What is trained and on what, then how fast.
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
                    f"{f' with fp8 products ({training.fp8_recipe})' if training.fp8 else ''}; "
                    f"global batch {training.global_batch_size}",
                ),
                ("devices", _device_count(plan)),
                *([("precision", words)] if (words := mixture_words(plan)) else []),
                *([("sends", words)] if (words := sends_words(plan)) else []),
                *_schedule(plan),
            )
        )
    if plan.estimates is not None:
        lines.append(facts(*_speed(plan.estimates, utilization, in_full), *_general_types(plan)))
    return tuple(lines)


def _general_types(plan: Plan) -> Iterator[tuple[str, str]]:
    """Name the GPU types of a plan that rest on a general efficiency; none with a profile."""
    if plan.estimates is None or plan.estimates.measured:
        return
    calibration = shipped_calibration()
    # Types in use without a table of products of their own.
    used = dict.fromkeys(plan.type_by_device.values())
    names = [name for name in used if not calibration.has_products(name)]
    if names:
        verb = "has" if len(names) == 1 else "have"
        yield "", f"({', '.join(names)} {verb} no table of products: {GENERAL_MEANS})"


RENDEZVOUS = (
    "rendezvous (--sends): a trainer that sends each byte once and waits for the receiver; neither "
    "stock Megatron nor this project's runtime is one"
)


def sends_words(plan: Plan) -> str:
    """Say that a plan is priced with sends other than those of who runs it; empty if it is not."""
    has_boundaries = any(len(replica.stages) > 1 for replica in plan.replicas)
    if plan.workload is not None and plan.workload.training.waits_for_receivers:
        return RENDEZVOUS if has_boundaries else ""
    if sends_as_stock(plan) or not (has_boundaries and is_stock(plan)):
        return ""
    return (
        "buffered (--sends): a trainer that goes on after a send; stock Megatron, whose flags "
        "`flags` prints for this plan, waits and is slower"
    )


def _schedule(plan: Plan) -> Iterator[tuple[str, str]]:
    """Show the order of computations, where it is not 1F1B."""
    # A pipeline in chunks names its schedule in any case.
    chunks = max(len(stage_chunks(stage)) for r in plan.replicas for stage in r.stages)
    if chunks > 1:
        yield "schedule", f"{plan.schedule}, up to {chunks} chunks of layers on a stage"
    elif plan.schedule != "1f1b":
        yield "schedule", plan.schedule


def facts(*rows: tuple[str, str]) -> Table:
    """Set names in one column, values in the next."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", min_width=12)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def idle_lines(plan: Plan) -> Iterable[RenderableType]:
    """Show the GPUs that the plan does not use, and why."""
    if not plan.idle_devices:
        return
    yield Text("Idle GPUs", style="bold")
    # GPUs with the same reason are one line.
    by_reason: dict[str, list[str]] = {}
    for device in plan.idle_devices:
        by_reason.setdefault(plan.idle_reasons.get(device, "no reason recorded"), []).append(device)
    for reason, devices in by_reason.items():
        yield Text(f"  {devices_by_node(devices)}: {reason}", style="yellow")
    yield Text()


def layout_line(plan: Plan) -> Text:
    """Write the plan in one line, as `--hetero-layout` takes it; equal replicas once, which the
    line then says."""
    layout = format_layout(plan.layout)
    folded = folded_layout(layout)
    line = Text.assemble(("Layout  ", "bold"), (folded, "green"))
    return line if folded == layout else line.append(f"\n{FOLDED_LAYOUT}", style="dim")


def utilization_words(utilization: Utilization) -> str:
    """Write `41.2% MFU (38.0% of the whole cluster's peak), 128 TFLOP/s per GPU`."""
    words = []
    if utilization.mfu is not None:
        part = f"{utilization.mfu:.1%} MFU"
        whole = utilization.mfu_of_cluster
        if whole is not None and whole < utilization.mfu:
            part += f" ({whole:.1%} of the whole cluster's peak)"
        words.append(part)
    words.append(f"{utilization.flops_per_s_per_gpu / 1e12:,.3g} TFLOP/s per GPU")
    return ", ".join(words)


def _speed(
    estimates: Estimates, utilization: Utilization | None, in_full: bool
) -> Iterable[tuple[str, str]]:
    yield (
        "step time",
        f"{format_duration(estimates.step_time_s)}, {estimates.tokens_per_s:,.0f} tokens/s",
    )
    if utilization is not None:
        yield "utilization", utilization_words(utilization)
        yield "", f"(MFU: {MFU_MEANS})"
    # The bound, what it covers and what it leaves out.
    if estimates.bound_s is not None and estimates.gap is not None:
        bound = format_duration(estimates.bound_s)
        more = "" if in_full else BOUND_IN_SHORT
        yield "lower bound", f"{bound}; {gap_words(estimates.gap)}{more}"
        if in_full and estimates.bound_with_context_parallel_s is not None:
            yield "", f"({bound_covers_words(estimates.bound_with_context_parallel_s)})"
        if in_full and estimates.bound_relaxes:
            yield "", f"(the bound relaxes: {estimates.bound_relaxes})"
    if estimates.price_per_hour is not None and estimates.price_per_million_tokens is not None:
        yield from _price(estimates.price_per_hour, estimates.price_per_million_tokens, estimates)
    if not estimates.measured:
        yield "basis", NOT_MEASURED


WIDE_GAP = 0.1
"""Part of the bound above which nobody should take a plan for nearly the best."""


def gap_words(gap: float) -> str:
    """Say how far a plan is from its lower bound."""
    if gap <= WIDE_GAP:
        return f"this plan is within {gap:.1%} of it"
    return f"this plan takes {gap:.1%} longer: whether a faster one exists is not known"


def bound_covers_words(divided_s: float) -> str:
    """Say that a bound covers no context parallelism, and give the bound of such plans.

    Args:
        divided_s: seconds of a step that none of these beats; 0 if nothing is known.
    """
    words = "a bound of plans without context parallelism"
    if not divided_s:
        return f"{words}; none is known of plans with it"
    return f"{words}; with it, in equal parts, none is faster than {format_duration(divided_s)}"


MAX_CAUSES = 3
"""Causes of traffic that a terminal names (`--json` has more)."""


def _price(machines: float, of_tokens: float, estimates: Estimates) -> Iterable[tuple[str, str]]:
    traffic = estimates.traffic_price_per_hour
    tokens = f"{of_tokens:,.4g} for a million tokens"
    if not traffic:
        yield "price", f"{machines:,.2f} an hour, {tokens}"
        return
    yield "price", f"{machines + traffic:,.2f} an hour, {tokens}"
    yield "", f"{machines:,.2f} of it for machines, {traffic:,.2f} for traffic between sites"
    for words in traffic_lines(estimates.traffic[:MAX_CAUSES]):
        yield "", words
    # Cheaper causes are summed up in one line.
    if len(estimates.traffic) > MAX_CAUSES:
        rest = sum(part.price_per_hour for part in estimates.traffic[MAX_CAUSES:])
        yield "", f"{rest:,.2f}: {count(len(estimates.traffic) - MAX_CAUSES, 'other')}"


def traffic_lines(traffic: Iterable[TrafficEstimate]) -> Iterator[str]:
    """Write a line for each cause of traffic between sites: the price an hour and the bytes of a
    step."""
    for part in traffic:
        yield (
            f"{part.price_per_hour:,.2f}: {part.cause}, between {' and '.join(part.sites)}, "
            f"{format_bytes(part.bytes_per_step)} a step"
        )


def _device_count(plan: Plan) -> str:
    used = Counter(plan.type_by_device.values())
    kinds = " + ".join(f"{number} x {kind}" for kind, number in used.items())
    total = count(plan.layout.num_devices, "GPU")
    text = f"{total}: {kinds}" if kinds else f"{total}, none named"
    return f"{text}; {len(plan.idle_devices)} idle" if plan.idle_devices else text
