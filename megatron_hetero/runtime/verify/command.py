"""`megatron-hetero verify` behind the command line: options in, a report and an exit code out."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text

from megatron_hetero.errors import UsageError
from megatron_hetero.model.spec import Workload
from megatron_hetero.plan.build import plan_from_layout
from megatron_hetero.plan.file import load_plan
from megatron_hetero.plan.layout import format_layout, parse_layout
from megatron_hetero.plan.plan import Plan
from megatron_hetero.runtime.local_launch import preload

_NAMES = {
    "loss": "loss",
    "gradients": "gradients",
    "gradient_norm": "gradient norm",
    "weights": "weights",
}


def run(arguments: argparse.Namespace) -> int:
    """Verify the plan of `arguments` (see `cli.verify`).

    Returns:
        0 if the plan trains as one process does, 1 if not.
    """
    # Ranks are forked, which CUDA does not survive; the check is one of arithmetic and order.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    plan, workload = _plan_and_workload(arguments)
    console = _console(arguments)
    with console.status("importing Megatron"):
        preload()

    from megatron_hetero.runtime.verify.faults import check_fault
    from megatron_hetero.runtime.verify.jobs import OPTIMIZERS, Options
    from megatron_hetero.runtime.verify.run import outcome_to_data, verify

    if arguments.plant is not None:
        check_fault(arguments.plant)
    options = Options(
        steps=arguments.steps,
        optimizers=(arguments.optimizer,) if arguments.optimizer else OPTIMIZERS,
        floor=arguments.floor,
        fault=arguments.plant,
    )
    with _folder(arguments.keep) as folder, console.status("starting") as status:
        outcome = verify(plan, workload, options, folder, _reporter(status, options.steps))
    data = outcome_to_data(outcome)
    _print(console, data, plan)
    if arguments.json:
        print(json.dumps(data, indent=2))
    return 0 if outcome.ok else 1


def _plan_and_workload(arguments: argparse.Namespace) -> tuple[Plan, Workload]:
    from megatron_hetero.model.load import load_workload

    if arguments.layout is not None:
        layout = parse_layout(arguments.layout)
        workload = load_workload(None, (*_defaults(arguments, layout), *arguments.megatron_args))
        return plan_from_layout(layout, workload), workload
    plan = load_plan(arguments.plan)
    if arguments.megatron_args:
        raise UsageError(
            f"{arguments.plan} says which model it is for; Megatron flags ("
            f"{' '.join(arguments.megatron_args)}) go with --layout."
        )
    if plan.workload is None:
        raise UsageError(
            f"{arguments.plan} does not say which model it is for; use "
            f"--layout '{format_layout(plan.layout)}' with Megatron's model flags after --."
        )
    return plan, plan.workload


def _defaults(arguments: argparse.Namespace, layout: object) -> tuple[str, ...]:
    """Sizes that a layout does not say and that are shrunk anyway; the user's flags come later and
    win."""
    from math import lcm

    from megatron_hetero.plan.plan import Layout

    if not isinstance(layout, Layout):
        raise TypeError(layout)
    unit = lcm(*layout.tensor_parallel_widths)
    heads = unit * 4
    sizes = [r.micro_batch_size or 1 for r in layout.replicas]
    batch = sum(r.num_micro_batches * s for r, s in zip(layout.replicas, sizes, strict=True))
    return (
        f"--num-layers={layout.replicas[0].num_layers}",
        f"--hidden-size={heads * 16}",
        f"--num-attention-heads={heads}",
        f"--seq-length={unit * 64}",
        f"--max-position-embeddings={unit * 64}",
        "--vocab-size=50257",
        "--micro-batch-size=1",
        f"--global-batch-size={batch}",
    )


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="megatron-hetero-verify-") as folder:
        yield Path(folder)


def _console(arguments: argparse.Namespace) -> Console:
    return Console(
        file=sys.stderr if arguments.json else sys.stdout,
        force_terminal=True if arguments.color == "always" else None,
        no_color=True if arguments.color == "never" else None,
        highlight=False,
    )


def _reporter(status: Status, steps: int) -> Callable[[str, int], None]:
    def report(what: str, step: int) -> None:
        status.update(f"{what}: step {min(step + 1, steps)} of {steps}")

    return report


def _print(console: Console, data: dict, plan: Plan) -> None:
    num_devices = plan.layout.num_devices
    console.print(
        Text.assemble(
            ("Verify  ", "bold"),
            f"{num_devices} processes on this plan beside one process of stock Megatron",
        )
    )
    console.print(Text.assemble(("layout  ", "bold"), (data["layout"], "green")))
    console.print(
        Text.assemble(
            ("model   ", "bold"),
            "shrunk to fit: " + ", ".join(data["shrunk"]),
        )
    )
    for optimizer, found in data["runs"].items():
        console.print()
        console.print(
            Text(
                f"Training with {optimizer.upper() if optimizer == 'sgd' else 'Adam'}", style="bold"
            )
        )
        console.print(_loss_table(found))
        console.print(_distance_table(found))
        for line in _remarks(found):
            console.print(Text(line))
    console.print()
    console.print(
        Text("The plan trains as one process does.", style="bold green")
        if data["ok"]
        else Text("The plan does NOT train as one process does.", style="bold red")
    )


def _loss_table(found: dict) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for heading in ("step", "loss, one process", "loss, the plan", "difference"):
        table.add_column(heading, justify="right")
    for step, losses in enumerate(found["losses"], start=1):
        one, plan = losses["one_process"], losses["plan"]
        table.add_row(str(step), f"{one:.7f}", f"{plan:.7f}", f"{abs(plan - one):.1e}")
    return table


def _distance_table(found: dict) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    table.add_column("worst relative difference")
    table.add_column("found", justify="right")
    table.add_column("allowed", justify="right")
    if found["floor"] is not None:
        table.add_column("rounding floor", justify="right")
    table.add_column("")
    for key, name in _NAMES.items():
        good = found[key] <= found["tolerance"][key]
        row = [name, f"{found[key]:.1e}", f"{found['tolerance'][key]:.0e}"]
        if found["floor"] is not None:
            row.append(f"{found['floor'][key]:.1e}")
        where = "" if good else f" at {found['worst'][key]}"
        table.add_row(*row, Text("ok", style="green") if good else Text("NO" + where, style="red"))
    return table


def _remarks(found: dict) -> Iterator[str]:
    yield (
        "  every step took the same samples"
        if found["same_samples"]
        else "  NO: the steps did not take the same samples"
    )
    yield (
        "  gradient norm and clip factor have the same bits on all ranks"
        if found["same_norm_bits_on_all_ranks"]
        else "  NO: the gradient norm differs between ranks"
    )
    if found["left_out_of_weights"]:
        yield (
            f"  left out of the weights: the key biases of {len(found['left_out_of_weights'])} "
            "layers, whose true gradient is zero"
        )
