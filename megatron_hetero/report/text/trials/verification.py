"""The result of `verify`, as text for a terminal: losses side by side, distances and their bounds.

The data is that of `megatron_hetero.lab.verify.outcome.outcome_to_data`, which `--json` prints too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from megatron_hetero.plan.layout import parse_layout
from megatron_hetero.report.text.terminal import facts
from megatron_hetero.units import format_bytes

QUANTITIES = {
    "loss": "loss",
    "gradients": "gradients",
    "gradient_norm": "gradient norm",
    "weights": "weights",
}
"""Key of the data -> its name in print."""

OPTIMIZERS = {"adam": "Adam", "sgd": "SGD"}
_FOUND = {
    "unlike_distribution_of_initial_weights": "initial weights that Megatron would not draw",
    "unequal_holders": "ranks hold one weight in unlike bits",
    "unlike_log": "the log says something else",
}
"""Key of what was found, if anything -> what that means."""


_WHOLE = 0.25
"""Floor from which four times of it (`lab.verify.distance.measure.FLOOR_FACTOR`) is a whole."""


def verification_report(data: Mapping[str, Any]) -> RenderableType:
    """Show everything that was compared, and the verdict in the last line."""
    num_devices = parse_layout(data["layout"]).num_devices
    heading = facts(
        ("verify", f"{num_devices} processes on this plan beside one process of stock Megatron"),
        ("layout", data["layout"]),
        ("layers", data["layers"]),
        ("model", "shrunk to fit: " + ", ".join(data["shrunk"]) if data["shrunk"] else "as it is"),
        *_flag_facts(data["flags"]),
    )
    runs = [line for name, found in data["runs"].items() for line in _run_lines(name, found)]
    return Group(heading, *runs, Text(), _verdict(data))


def _flag_facts(flags: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Show the job's flags as the check took them: kept, added, without effect, left out."""
    if flags["kept"]:
        yield "kept", ", ".join(flags["kept"])
    if flags["added"]:
        yield "added", ", ".join(flags["added"]) + " (parts of the batch count unlike tokens)"
    for note, names in flags["no_effect"].items():
        yield "no effect", f"{', '.join(names)} ({note})"
    for left in flags["left_out"]:
        yield "left out", f"{left['flag']}: {left['reason']}"


def _run_lines(optimizer: str, found: Mapping[str, Any]) -> Iterator[RenderableType]:
    yield Text()
    yield Text(f"Training with {OPTIMIZERS[optimizer]}", style="bold")
    yield _loss_table(found)
    yield _distance_table(found)
    for line in (*_adam_remarks(optimizer, found), *_remarks(found)):
        yield Padding(Text(line), (0, 0, 0, 2))


def _adam_remarks(optimizer: str, found: Mapping[str, Any]) -> Iterator[str]:
    """Say what Adam's rows compare, which is less than all (`lab.verify.distance.compare`)."""
    if optimizer != "adam":
        return
    # Later steps differ by what Adam makes of rounding, so they have a bound of their own.
    later = found["later_gradients"]
    bad = "" if later["found"] <= later["allowed"] else f"NO at {later['where']}: "
    yield (
        f"{bad}gradients: those of the first step, before any weight moved; in later steps up to "
        f"{later['found']:.0e} of a tensor's length apart (allowed {later['allowed']:.0e}), and "
        "SGD compares all steps"
    )
    nothing = "; 0.0: nothing is left, even where losses differ" if not found["weights"] else ""
    yield f"weights: their difference beyond rounding and what Adam makes of gradients{nothing}"


def _loss_table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("step", "loss, one process", "loss, the plan", "difference"):
        table.add_column(heading, justify="right")
    for step, losses in enumerate(found["losses"], start=1):
        one, plan = losses["one_process"], losses["plan"]
        table.add_row(str(step), f"{one:.7f}", f"{plan:.7f}", f"{abs(plan - one):.1e}")
    return table


def _distance_table(found: Mapping[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("worst relative difference")
    table.add_column("found", justify="right")
    table.add_column("allowed", justify="right")
    # The floor is what rounding alone does, where the check has measured it.
    if found["floor"] is not None:
        table.add_column("rounding floor", justify="right")
    table.add_column("")
    for key, name in QUANTITIES.items():
        row = [name, f"{found[key]:.1e}", f"{found['tolerance'][key]:.0e}"]
        if found["floor"] is not None:
            row.append(f"{found['floor'][key]:.1e}")
        if found[key] <= found["tolerance"][key] and _says_nothing(found, key):
            table.add_row(*row, Text("checks little: rounding alone is this far", style="yellow"))
        elif found[key] <= found["tolerance"][key]:
            table.add_row(*row, Text("ok", style="green"))
        else:
            table.add_row(*row, Text(f"NO at {found['worst'][key]}", style="red"))
    return table


def _says_nothing(found: Mapping[str, Any], key: str) -> bool:
    """Tell if rounding alone moves some tensor by its whole size, which then may be anything."""
    floor = found["floor"]
    return floor is not None and not floor[key] < _WHOLE


def _remarks(found: Mapping[str, Any]) -> Iterator[str]:
    # Equality with one process, bit by bit.
    yield (
        "every step took the same samples"
        if found["same_samples"]
        else "NO: the steps did not take the same samples"
    )
    yield (
        "gradient norm and clip factor have the same bits on all ranks"
        if found["same_norm_bits_on_all_ranks"]
        else "NO: the gradient norm differs between ranks"
    )
    yield (
        "initial weights, as the ranks draw them, have the bits of one process"
        if found["same_initial_weights"]
        else f"NO: unlike initial weights: {found['unequal_initial_weights']}"
    )
    for key, words in _FOUND.items():
        if found[key] is not None:
            yield f"NO: {words}: {found[key]}"
    if not found["same_random_states_in_groups"]:
        yield "NO: ranks of a tensor-parallel group ended with unlike random states"
    if not found["own_random_states_of_regions"]:
        yield (
            "NO: ranks of a tensor-parallel group would drop alike what they divide: their random "
            "states of tensor-parallel regions are the same"
        )
    if not found["same_loss_scales"]:
        yield "NO: some rank scaled a loss, or skipped a step, otherwise than the one process"
    # Facts about experts, boundaries and gradients, where the plan has them.
    routing = found.get("routing")
    if routing:
        yield (
            ("" if routing["ok"] else "NO: ")
            + f"experts: the one process's choices were replayed; {routing['flipped']} of "
            f"{routing['tokens']} would have been others, with scores up to "
            f"{routing['margin']:.1e} apart (allowed {routing['allowed_margin']:.0e})"
        )
    boundaries = found.get("boundaries")
    if boundaries:
        worst = max(boundaries, key=lambda b: b["bytes_over_least"])
        least = sum(b["least_bytes"] for b in boundaries)
        yield (
            f"boundaries: {sum(b['messages'] for b in boundaries)} tensors of "
            f"{format_bytes(least)} in all, handed over {worst['bytes_over_least']:.2f}x"
            + ("" if worst["bytes_over_least"] <= 1 else f" at {_boundary(worst)}")
        )
    sync = found.get("gradient_sync")
    if sync is not None and sync["most_collectives_per_step"]:
        yield (
            f"gradient sync: up to {sync['most_collectives_per_step']:.0f} collectives a step, "
            f"{sync['bytes_over_least']:.2f}x the least bytes, {sync['copied_share']:.0%} copied"
        )
    if found["left_out_of_weights"]:
        yield (
            f"left out of the weights: the key biases of {len(found['left_out_of_weights'])} "
            "layers, whose true gradient is zero"
        )


def _boundary(found: Mapping[str, Any]) -> str:
    return f"boundary {found['boundary']} of replica {found['replica']}"


def _verdict(data: Mapping[str, Any]) -> Text:
    left = ", ".join(each["flag"] for each in data["flags"]["left_out"])
    if not data["ok"]:
        return Text("The plan does NOT train as one process does.", style="bold red")
    if left:
        words = f"The plan trains as one process does: equal, but for {left}, left out here."
        return Text(words, style="bold green")
    return Text("The plan trains as one process does.", style="bold green")
