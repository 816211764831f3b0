"""Arguments that several verbs have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launch import DEFAULT_MASTER_PORT


def at_least_one(text: str) -> int:
    """Return a count that the user gave; argparse reports what is no count."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return value


def add_master_port(parser: argparse.ArgumentParser) -> None:
    """Declare `--master-port`."""
    parser.add_argument(
        "--master-port",
        type=int,
        default=DEFAULT_MASTER_PORT,
        metavar="PORT",
        help=f"port of the rendezvous on the first host (default: {DEFAULT_MASTER_PORT})",
    )


def check_new_folder(folder: Path, name: str) -> None:
    """Refuse to write over what is there.

    Args:
        name: how the user gave the folder, for the message.
    Raises:
        UsageError: it is a file, or a folder with something in it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{name}: it exists and is not an empty folder; name a new one")
