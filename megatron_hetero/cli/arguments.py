"""Arguments that several verbs have in common."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import get_args

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launch import DEFAULT_MASTER_PORT
from megatron_hetero.model.spec import Workload
from megatron_hetero.model.training import Sends


def number[Number: float](read: Callable[[str], Number], text: str, what: str) -> Number:
    """Return a number that the user gave.

    Args:
        read: `int` or `float`.
        what: such a number, in words.
    Raises:
        ArgumentTypeError: it is none; argparse itself would name the function that reads it.
    """
    try:
        return read(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f'"{text[:40]}" is not {what}') from None


def at_least_one(text: str) -> int:
    """Return a count that the user gave; argparse reports what is no count."""
    value = number(int, text, "a whole number")
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def add_model_argument(parser: argparse.ArgumentParser, help: str) -> None:
    """Declare `--model`, and the environment in which a script is started."""
    parser.add_argument(
        "--model",
        type=Path,
        metavar="FILE",
        help=f'{help}; a script\'s arguments may follow its name: --model "run.sh 8B 1"',
    )
    parser.add_argument(
        "--model-env",
        action="append",
        type=_environment,
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the environment in which the script of --model is started (NAME= for "
        "an empty one, NAME alone for one that is not set); repeatable",
    )


def _environment(text: str) -> tuple[str, str | None]:
    """Read `NAME=VALUE`; the value is None without `=`.

    Raises:
        ArgumentTypeError: the name is none of the shell's.
    """
    # The value may hold further `=`.
    name, separator, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
        raise argparse.ArgumentTypeError(f'"{text[:40]}": write NAME=VALUE')
    return name, value if separator else None


def add_master_port(parser: argparse.ArgumentParser) -> None:
    """Declare `--master-port`."""
    parser.add_argument(
        "--master-port",
        type=int,
        default=DEFAULT_MASTER_PORT,
        metavar="PORT",
        help=f"port of the rendezvous on the first host (default: {DEFAULT_MASTER_PORT})",
    )


def add_sends_argument(parser: argparse.ArgumentParser, default: str) -> None:
    """Declare `--sends`.

    Args:
        default: what holds where it is not given, in words.
    """
    parser.add_argument(
        "--sends",
        choices=get_args(Sends),
        help="how stages send, for predictions: as the trainer of the plan does (stock Megatron "
        "waits until each tensor has arrived), buffered, as this project's runtime and trainers "
        "that go on after a send do, or rendezvous, as trainers do that send each byte once and "
        f"wait for the receiver of what is above NCCL's buffer of 4 MiB (default: {default})",
    )


def with_sends(workload: Workload, sends: Sends | None) -> Workload:
    """Return the job with plans priced for these sends; unchanged if `sends` is None."""
    if sends is None:
        return workload
    return replace(workload, training=replace(workload.training, sends=sends))


def check_new_folder(folder: Path, name: str) -> None:
    """Refuse to write over what is there.

    Args:
        name: how the user gave the folder, for the message.
    Raises:
        UsageError: it is a file, or a folder with something in it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{name}: it exists and is not an empty folder; name a new one")
