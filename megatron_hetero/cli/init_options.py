"""Options of `init` that go together: what each source of machines reads, and what `--job` does."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from megatron_hetero.errors import UsageError

_LISTS = ("--from-slurm", "--from-kubernetes", "--from-skypilot")
SOURCES = ("--node", *_LISTS)
"""Options that say where the machines come from, in place of answers on a terminal."""

# Option -> the sources with which it is read, and why no other reads it.
_READ_WITH = {
    "--gpu-name": (_LISTS, "other machines are not named by a scheduler"),
    "--own-type": (("--node",), "the types of other machines are described in cluster.yaml"),
    "--free": (("--from-slurm",), "the other lists do not say what is free"),
    "--between-nodes": (SOURCES, "the questions on a terminal ask for the network"),
    "--between-sites": (SOURCES, "the questions on a terminal ask for the network"),
}
_OF_MACHINES = ("--nics", "--price")


def source_of(arguments: argparse.Namespace) -> str | None:
    """Return the option that names the machines; None if the user is to be asked.

    Raises:
        UsageError: several do, for two lists could name one machine twice; or an option is given
            that this source would not read.
    """
    given = _given(arguments, SOURCES)
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)}: give one of them, and put the files together")
    for option in _given(arguments, _READ_WITH):
        sources, reason = _READ_WITH[option]
        if not set(given) & set(sources):
            raise UsageError(f"{option} goes with {' or '.join(sources)}: {reason}")
    return given[0] if given else None


def check_job(arguments: argparse.Namespace) -> None:
    """Refuse the options of a cluster, which `--job` would not read.

    Raises:
        UsageError: there are some.
    """
    given = _given(arguments, (*SOURCES, *_READ_WITH, *_OF_MACHINES))
    if given:
        verb = "describes" if len(given) == 1 else "describe"
        raise UsageError(
            f"{' and '.join(given)} {verb} a cluster, --job a training script: one at a time"
        )


def _given(arguments: argparse.Namespace, options: Iterable[str]) -> tuple[str, ...]:
    # An option that nobody gave is None, an empty list or False.
    names = {option: option.removeprefix("--").replace("-", "_") for option in options}
    return tuple(option for option, name in names.items() if getattr(arguments, name))
