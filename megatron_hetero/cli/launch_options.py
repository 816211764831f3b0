"""Options of `launch` that only some launchers read: declared for all, refused by the others."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron_hetero.errors import UsageError
from megatron_hetero.flags.launchers.launcher import LaunchOption
from megatron_hetero.flags.launchers.registry import LAUNCHERS


def readers() -> dict[LaunchOption, list[str]]:
    """Return the options that only some launchers read, each with the names of these launchers."""
    readers: dict[LaunchOption, list[str]] = {}
    for launcher in LAUNCHERS.values():
        for option in launcher.options:
            readers.setdefault(option, []).append(launcher.name)
    return readers


def add_options_of_launchers(parser: argparse.ArgumentParser) -> None:
    """Declare the options that only some launchers read, in groups of these launchers' names."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option, names in readers().items():
        title = ", ".join(names)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        group, text = groups[title], f"{option.help} (for {title})"
        if option.metavar is None:
            group.add_argument(option.flag, action="store_true", help=text)
        elif option.repeats:
            group.add_argument(
                option.flag, action="append", default=[], metavar=option.metavar, help=text
            )
        else:
            group.add_argument(option.flag, metavar=option.metavar, help=text)


def refuse_options_of_others(arguments: argparse.Namespace) -> None:
    """Refuse options that the launcher of the command line would not read."""
    # Options of all launchers are declared; only those of the chosen one are read.
    for option, names in readers().items():
        if arguments.launcher not in names and getattr(arguments, option.name):
            raise UsageError(
                f"{option.flag}: --for {arguments.launcher} does not read it; it goes with --for "
                f"{' or '.join(names)}"
            )


def refuse_options_of_training(arguments: argparse.Namespace) -> None:
    """Refuse options of launchers of training, where the plan is one of serving."""
    given = [option.flag for option in readers() if getattr(arguments, option.name)]
    if given:
        raise UsageError(f"{', '.join(given)}: {arguments.plan} is a serving plan; leave them")


def refuse_image(arguments: argparse.Namespace, able: Sequence[str]) -> None:
    """Refuse an image for a launcher that starts no container; `able` are those that do."""
    if arguments.image is not None and arguments.launcher not in able:
        raise UsageError(
            f"--image: --for {arguments.launcher} starts no container; it goes with --for "
            f"{' or '.join(able)}"
        )
