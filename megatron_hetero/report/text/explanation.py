"""Causes of a plan's step time and its headroom, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.planner.advise.explain import Explanation, HiddenHop
from megatron_hetero.report.text.comparison import comparison_lines
from megatron_hetero.report.text.words import GIB, devices_by_node
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
