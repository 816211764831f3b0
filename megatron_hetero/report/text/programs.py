"""Programs of layers beside what a plan's stages do, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.planner.advise.programs import StagePrograms
from megatron_hetero.planner.synthesis.forms import whole_shares
from megatron_hetero.planner.synthesis.states import Instruction, LayerProgram
from megatron_hetero.planner.synthesis.synthesise import LayerOption
from megatron_hetero.report.text.words import devices_by_node
from megatron_hetero.units import format_bytes, format_duration


def program_lines(stages: Sequence[StagePrograms]) -> Iterator[RenderableType]:
    """Show, for each stage, the options for a layer on its GPUs."""
    for stage in stages:
        yield Text.assemble(
            ("Programs of a layer", "bold"),
            f"  replica {stage.replica}, stage {stage.stage} ({devices_by_node(stage.devices)}): "
            f"{stage.shape}, {format_duration(stage.layer_s)} for each micro-batch",
        )
        if not stage.options:
            yield Padding(Text("no other way to divide a layer fits"), (0, 0, 1, 2))
            continue
        yield Padding(_table(stage.options), (0, 0, 1, 1))


def _table(options: Sequence[LayerOption]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("synthesised", no_wrap=True)
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("as priced", justify="right", no_wrap=True)
    table.add_column("fullest GPU", justify="right", no_wrap=True)
    table.add_column("collectives", overflow="fold")
    for option in options:
        priced = "" if option.priced_s is None else format_duration(option.priced_s)
        collectives = Text(collective_words(option.synthesis.program))
        if option.lacking:
            collectives.append(f"\nnot executed: {', '.join(option.lacking)}", style="dim")
        table.add_row(
            Text(option_words(option), style="green"),
            format_duration(option.synthesis.seconds),
            priced,
            format_bytes(max(option.bytes)),
            collectives,
        )
    return table


def option_words(option: LayerOption) -> str:
    """Return the stage or the replicas as which an option is executed, in whole shares."""
    form, shares = option.form, option.synthesis.shares
    if form is None:
        return "any program"
    stage = form.stage(shares)
    if stage is not None:
        return stage
    parts = ":".join(map(str, whole_shares(shares["sequences"])))
    sharded = ", sharded" if form.stored == "elements" else ""
    return f"replicas {parts}{sharded}"


def collective_words(program: LayerProgram) -> str:
    """Return the collectives of a program, forward and backward."""
    turn = next(i for i, one in enumerate(program) if one.name == "turn")
    passes = (("forward", program[:turn]), ("backward", program[turn:]))
    return "; ".join(f"{name} {_sent(own)}" for name, own in passes)


def _sent(program: Sequence[Instruction]) -> str:
    names: dict[str, list[str]] = {}
    for one in program:
        if one.kind not in ("compute", "demand", "slice"):
            names.setdefault(one.kind, []).append(one.name)
    return ", ".join(f"{kind} {' '.join(of)}" for kind, of in names.items()) or "nothing"


def programs_data(stage: StagePrograms) -> dict[str, object]:
    """Return the options of a stage as JSON has them."""
    return {
        "replica": stage.replica,
        "stage": stage.stage,
        "devices": list(stage.devices),
        "layout": stage.shape,
        "layer_s": stage.layer_s,
        "options": [
            {
                "form": None if option.form is None else option.form.name,
                "as": option_words(option),
                "layer_s": option.synthesis.seconds,
                "priced_layer_s": option.priced_s,
                "shares": {d: list(own) for d, own in option.synthesis.shares.items()},
                "bytes": list(option.bytes),
                "program": [str(one) for one in option.synthesis.program],
                "not_executed": list(option.lacking),
            }
            for option in stage.options
        ],
    }
