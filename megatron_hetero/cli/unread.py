"""Options that one use of a verb does not read: refused by name, never ignored."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection

from megatron_hetero.errors import UsageError

MEGATRON_FLAGS = "megatron_args"
"""Stands for Megatron's flags among the names that a use reads."""


def refuse_unread(
    arguments: argparse.Namespace,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    reads: Collection[str],
    what_it_does: str,
) -> None:
    """Refuse the options that a use of a verb would not read.

    An option typed with its default value cannot be told from one that was not typed, and changes
    nothing.

    Args:
        arguments: of the command line.
        add_arguments: declares the arguments of the verb.
        reads: names of `arguments` that the use reads, `MEGATRON_FLAGS` among them.
        what_it_does: the use in words, such as "--memory makes no plan".
    Raises:
        UsageError: others were given; the message names them.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_arguments(parser)
    given = [
        action.option_strings[-1] if action.option_strings else str(action.metavar)
        for action in parser._actions
        if action.dest not in reads and getattr(arguments, action.dest) != action.default
    ]
    if arguments.megatron_args and MEGATRON_FLAGS not in reads:
        given.append("Megatron's flags")
    if given:
        verb = "does" if len(given) == 1 and given[0].startswith("-") else "do"
        raise UsageError(f"{what_it_does}, so {', '.join(given)} {verb} not go with it")
