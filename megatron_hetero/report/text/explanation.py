"""Causes of a plan's step time, as text for a terminal: causes, comparison, headroom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.planner.advise.alternatives import Alternative
from megatron_hetero.planner.advise.explain import Explanation, HiddenHop
from megatron_hetero.report.text.terminal import facts
from megatron_hetero.report.text.words import GIB, count, devices_by_node, folded_layout
from megatron_hetero.units import format_bytes, format_duration

BAR_WIDTH = 24
CAUSES = (
    ("compute", "compute_s"),
    ("tensor-parallel communication", "tensor_parallel_s"),
    ("stage boundaries", "boundary_s"),
    ("waiting (pipeline bubble)", "waiting_s"),
    ("gradient exchange", "gradient_sync_s"),
    ("optimizer update", "update_s"),
)
"""Words for each field of `TimeByCause`, in the order of a step."""
STAGE_CAUSES = (
    ("products", "products_s"),
    ("attention", "attention_s"),
    ("memory", "memory_s"),
    ("launches", "launches_s"),
    ("links", "communication_s"),
)
"""Words for each field of `StageCauses`."""
_FASTEST, _NEXT = "best of all", "next best"
_ALIKE = 5e-4
"""Relative difference below which two steps are printed as the same."""


def explanation_report(explanation: Explanation, not_stock: Sequence[str]) -> RenderableType:
    """Show causes, memory left and alternatives; `not_stock` as for `comparison_lines`."""
    return Group(
        *cause_lines(explanation),
        *stage_time_lines(explanation),
        *hidden_hop_lines(explanation),
        *sharded_lines(explanation),
        *exchange_lines(explanation),
        *headroom_lines(explanation),
        *comparison_lines(explanation, not_stock, runners_up=True),
    )


def cause_lines(explanation: Explanation) -> Iterator[RenderableType]:
    """Show where the step's time goes on the stage that sets the pace."""
    binding = explanation.binding
    yield Text.assemble(
        ("Where the time goes", "bold"),
        f"  replica {binding.replica}, stage {binding.stage} ({devices_by_node(binding.devices)}), "
        "which sets the pace",
    )
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column()
    for _ in range(2):
        table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    # Parts of the step, with a bar of `BAR_WIDTH` characters for the whole.
    for name, field in CAUSES:
        seconds: float = getattr(explanation.time_by_cause, field)
        part = seconds / explanation.step_time_s
        bar = "#" * round(part * BAR_WIDTH)
        table.add_row(name, format_duration(seconds), f"{part:.1%}", Text(bar, style="cyan"))
    table.add_row(Text("step", style="bold"), format_duration(explanation.step_time_s), "100.0%")
    yield Padding(table, (0, 0, 1, 2))


def stage_time_lines(explanation: Explanation) -> Iterator[RenderableType]:
    """Show what each stage's passes over one micro-batch are spent on; equal rows once."""
    if not explanation.stage_times:
        return
    yield Text("What a stage's time is", style="bold").append(
        "  of one micro-batch, forward and backward", style="not bold"
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("stage")
    for heading in ("time", *(heading for heading, _ in STAGE_CAUSES)):
        table.add_column(heading, justify="right", no_wrap=True)
    # Stages whose row reads the same are one row.
    rows: dict[tuple[str, ...], list[str]] = {}
    for stage in explanation.stage_times:
        parts = [getattr(stage.causes, field) / stage.time_s for _, field in STAGE_CAUSES]
        key = (format_duration(stage.time_s), *(f"{part:.0%}" for part in parts))
        rows.setdefault(key, []).append(f"{stage.replica}.{stage.stage}")
    for texts, names in rows.items():
        more = f" and {len(names) - 3} more" if len(names) > 4 else ""
        table.add_row(", ".join(names[: 3 if more else 4]) + more, *texts)
    yield Padding(table, (0, 0, 1, 2))
    if any(stage.is_measured for stage in explanation.stage_times):
        yield Text("  measured times are divided as the model divides its own", style="dim")


def hidden_hop_lines(explanation: Explanation) -> Iterator[RenderableType]:
    """Show the replicas whose launch counts are not 1F1B's, equal replicas together, with the hop
    hidden and the time saved."""
    # The key has all that the lines below say of a replica.
    alike: dict[tuple[object, ...], list[HiddenHop]] = {}
    for hop in explanation.hidden_hops:
        shown = (format_duration(hop.round_trip_s), format_duration(hop.period_s))
        saves = hop.pipeline_s <= hop.own_pipeline_s
        key = (hop.launch_counts, hop.own_launch_counts, hop.boundary, *shown, saves)
        alike.setdefault(key, []).append(hop)
    for hops in alike.values():
        hop = hops[0]
        who = f"replica {hop.replica} runs"
        if len(hops) > 1:
            who = f"replicas {_numbers(tuple(h.replica for h in hops))} run"
        yield Text.assemble(
            ("Launched ahead", "bold"),
            f"  {who} {_numbers(hop.launch_counts)} forwards before the first "
            f"backward (1F1B: {_numbers(hop.own_launch_counts)})",
        )
        # The hop that the counts hide, and what they save or cost.
        if hop.round_trip_s:
            there_and_back = (
                f"stages {hop.boundary} and {hop.boundary + 1} are "
                f"{format_duration(hop.round_trip_s)} apart, there and back, against a period of "
                f"{format_duration(hop.period_s)}"
            )
        else:
            there_and_back = "no hop takes time"
        verb = "save" if hop.pipeline_s <= hop.own_pipeline_s else "cost"
        # Equal replicas may save unlike seconds, which then are a range.
        saved_s = sorted(abs(h.own_pipeline_s - h.pipeline_s) for h in hops)
        saved = " to ".join(dict.fromkeys(map(format_duration, (saved_s[0], saved_s[-1]))))
        longest_s = max(h.own_pipeline_s for h in hops)
        yield Padding(
            Text(
                f"{there_and_back}; the counts {verb} {saved} of the pipeline's "
                f"{format_duration(longest_s)}"
            ),
            (0, 0, 1, 2),
        )


def sharded_lines(explanation: Explanation) -> Iterator[RenderableType]:
    """Show which layers are sharded, with the time taken and the memory spared."""
    for stage in explanation.sharded:
        saved, missing = format_bytes(abs(stage.saved_bytes)), format_bytes(stage.missing_bytes)
        spares = "spares" if stage.saved_bytes >= 0 else "costs"
        # What whole layers would do to memory.
        whole = "would fit"
        if stage.missing_bytes > 0:
            whole = f"would lack {missing}"
        yield Text.assemble(
            ("Sharded", "bold"),
            f"  stage {stage.stage}: {stage.num_sharded} of {stage.num_layers} layers; their "
            f"exchanges take {format_duration(stage.exchange_s)} of the step; that {spares} each "
            f"GPU {saved} at least, and with whole layers it {whole}",
        )
        yield Text()


def exchange_lines(explanation: Explanation) -> Iterator[RenderableType]:
    """Show how gradients cross between sites, and the step time of the alternative."""
    choice = explanation.exchange
    if choice is None:
        return
    with_s, without_s = map(format_duration, (choice.step_time_s, choice.other_step_time_s))
    # Why groups of machines are used, or why they are not.
    if choice.is_used:
        groups = " | ".join(_machines(group) for group in choice.groups[:_MAX_GROUPS])
        more = len(choice.groups) - _MAX_GROUPS
        text = (
            f"{choice.num_crossing} of {choice.num_sets} sets of holders reduce inside groups of "
            f"machines first, the others in one exchange: {groups}"
            f"{f' | and {more} more' if more > 0 else ''}. {_parts(choice.uplinks)}With one "
            f"exchange among all holders the step takes {without_s}"
        )
    else:
        is_less = choice.step_time_s < choice.other_step_time_s
        kind = "machines" if all(len(group) == 1 for group in choice.groups) else "sites"
        text = f"one exchange among all holders; by {kind} the step takes {with_s}"
        text += ", too little less" if is_less else ""
    yield Text.assemble(("Gradients", "bold"), f"  {text}")
    yield Text()


_MAX_GROUPS = 4
_MAX_MACHINES = 3


def _machines(group: Sequence[str]) -> str:
    more = len(group) - _MAX_MACHINES
    return " + ".join(group[:_MAX_MACHINES]) + (f" and {more} more" if more > 0 else "")


def _parts(uplinks: Sequence[Sequence[int]]) -> str:
    """Say by what machines own parts, and how unlike the largest and the smallest are."""
    if not uplinks:
        return ""
    numbers = [uplink for group in uplinks for uplink in group]
    unlike = max(numbers) / min(numbers)
    return f"Parts of gradients suit the machines' uplinks, which differ up to {unlike:.3g} times. "


def _numbers(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts))


def headroom_lines(explanation: Explanation) -> Iterator[RenderableType]:
    """Show the devices with the least and the most memory left."""
    # By bytes left, then by name.
    ordered = sorted(explanation.headroom_bytes.items(), key=lambda item: (item[1], item[0]))
    if not ordered:
        return
    (tightest, least), (_, most) = ordered[0], ordered[-1]
    # A plan of the user's own may not fit.
    if least < 0:
        yield Text.assemble(
            ("Memory lacks", "bold red"),
            f"  {-least / GIB:.1f} GiB on {tightest}, the fullest, to keep the reserve free: "
            "the plan does not fit",
        )
        yield Text()
        return
    yield Text.assemble(
        ("Memory left", "bold"),
        f"  between {least / GIB:.1f} GiB ({tightest}) and {most / GIB:.1f} GiB beside the reserve",
    )
    yield Text()


def comparison_lines(
    explanation: Explanation, not_stock: Sequence[str], *, runners_up: bool
) -> Iterator[RenderableType]:
    """Compare the plan with the best one of stock Megatron and, if asked, the next best of all.

    Args:
        not_stock: obstacles between the plan and stock Megatron (`flags.reasons_not_stock`).
    """
    yield Text("Beside other plans", style="bold")
    # Rows in the order: stock Megatron's best, next best plans, the simplest, those by hand.
    others = [(_NEXT, other) for other in (explanation.runners_up if runners_up else ())]
    # A plan that is stock's own needs no comparison with itself.
    if explanation.best_stock is not None and (not_stock or explanation.best_stock.slower_by < 0):
        others.insert(0, ("best of stock Megatron", explanation.best_stock))
    others += list(_simplest(explanation))
    others += [(other.strategy, other) for other in explanation.by_hand]
    if others:
        within = explanation.simplest_within
        how = {
            _FASTEST: "--plugin-gain 0% plans it" if within is None else "leave away --simplest",
            _NEXT: "plan anew",
        }
        yield Padding(_comparison_table(explanation.step_time_s, others, how), (0, 0, 1, 1))
    yield Padding(facts(*_stock_facts(explanation, not_stock)), (0, 0, 0, 1))
    yield Text(f" {count(explanation.num_priced, 'plan')} compared\n", style="dim")


def refused_lines(explanation: Explanation) -> Iterator[str]:
    """Yield a line if faster plans were found that no job could run."""
    others = explanation.refused
    if others:
        fastest = others[0]
        yield (
            f"No job could run the fastest plan, {fastest.layout} "
            f"({format_duration(fastest.step_time_s)} a step): {fastest.because.rstrip()}\n"
            "This is the next best plan that runs"
            + (f", after {len(others)} that do not" if len(others) > 1 else "")
        )


def _simplest(explanation: Explanation) -> Iterator[tuple[str, Alternative]]:
    simple, stock = explanation.simplest, explanation.best_stock
    if simple is not None and (stock is None or stock.layout != simple.layout):
        yield f"simplest within {100 * (explanation.simplest_within or 0.0):.3g}%", simple
    if explanation.fastest is not None:
        yield _FASTEST, explanation.fastest


def _stock_facts(explanation: Explanation, not_stock: Sequence[str]) -> Iterator[tuple[str, str]]:
    # Stock Megatron runs it, or why not and how near its best plan comes.
    if not not_stock:
        yield "plug-in", "not needed: stock Megatron runs this plan"
        return
    yield "plug-in", f"needed for {'; '.join(not_stock)}"
    if explanation.best_stock is not None:
        return
    short = explanation.stock_shortage
    if short is None:
        yield "stock Megatron", "no plan at all under the limits and numbers of this job"
        return
    yield (
        "stock Megatron",
        f"no plan fits: the nearest, {folded_layout(short.layout)}, lacks "
        f"{format_bytes(short.missing_bytes)} on {devices_by_node(short.devices)} "
        f"({short.gpu_type}), with {format_bytes(short.reserve_bytes)} in reserve",
    )


def _comparison_table(
    step_time_s: float, others: Sequence[tuple[str, Alternative]], how: Mapping[str, str]
) -> Table:
    """Return a row for each of the other plans; `how` says how to get those that are faster."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("plan", no_wrap=True)
    table.add_column("step", justify="right", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    table.add_column("layout, and what makes it slower", overflow="fold")
    table.add_row("this", format_duration(step_time_s), "", "")
    for name, alternative in others:
        _add_alternative(table, name, alternative, how.get(name, "plan --stock plans it"))
    return table


def _add_alternative(table: Table, name: str, alternative: Alternative, how: str) -> None:
    why = Text.assemble((folded_layout(alternative.layout), "green"))
    if alternative.settings:
        why.append(f"\n{alternative.settings}")
    # A difference that prints as 0.0 % is none.
    slower = f"{alternative.slower_by:+.1%}"
    if slower in ("-0.0%", "+0.0%"):
        slower = "the same"
    if alternative.slower_by > 0:
        why.append(f"\n{alternative.because}")
    elif alternative.slower_by < -_ALIKE:
        # Its space has micro-batch sizes and chunks that the search for this plan has not.
        why.append(f"\nfaster than this: {how}")
    table.add_row(name, format_duration(alternative.step_time_s), slower, why)
