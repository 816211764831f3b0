"""Hostile words in the places of names, paths and flags: refused, or carried to the letter."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from megatron_hetero.cluster.inventory.remote import targets
from megatron_hetero.cluster.names import check_host_name
from megatron_hetero.errors import HeteroError
from megatron_hetero.flags.emit import megatron_args, render_bash
from megatron_hetero.flags.launch import node_launches
from megatron_hetero.flags.launchers.job import LaunchJob
from megatron_hetero.flags.launchers.node_script import node_script
from megatron_hetero.flags.launchers.slurm import slurm_options
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.plan.plan import Plan
from tests.plan.edits import PLAN

_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/@+,=-]*")
"""No shell, YAML, ssh or Slurm reads more into it than a word."""


def shell_faults(argv: tuple[str, ...]) -> Iterator[str]:
    """Find where a shell would not see `argv` again."""
    if shlex.split(shlex.join(argv)) != list(argv):
        yield f"shlex.join: {argv!r}"
    if shlex.split(render_bash(argv)) != ["MEGATRON_ARGS=(", *argv, ")"]:
        yield f"render_bash: {argv!r}"


def word_faults(word: str) -> Iterator[str]:
    """Find places that a hostile word gets through."""
    yield from _flag_faults(word)
    for title, read in _NAMES.items():
        try:
            taken = read(word)
        except (HeteroError, ValueError) as error:
            # Functions for schemas raise ValueError, which `files` makes one of the errors.
            if not str(error):
                yield f"{title}: {word!r} is refused without a word"
            continue
        for text in taken:
            if not _SAFE.fullmatch(text):
                yield f"{title}: {text!r} is taken"
    yield from _path_faults(word)


def _host(word: str) -> Sequence[str]:
    check_host_name(word)
    hosts = (replace(PLAN.hosts[0], host=word), *PLAN.hosts[1:])
    LaunchJob(replace(PLAN, hosts=hosts)).check()
    return [word]


def _job(word: str, place: str) -> Sequence[str]:
    LaunchJob(PLAN, **{place: word}).check()
    return [word]


def _interface(word: str) -> Sequence[str]:
    LaunchJob(PLAN, interfaces=(("", word),)).check()
    return [word]


def _slurm(word: str, place: str) -> Sequence[str]:
    given = dict.fromkeys(("account", "qos", "time")) | {place: word}
    slurm_options([], [], **given)
    return [word]


_NAMES: dict[str, Callable[[str], Sequence[str]]] = {
    "--name": lambda word: _job(word, "name"),
    "--interface": _interface,
    # A path's first "/" and pyxis' "#" are quoted wherever they are written.
    "--image": lambda word: [
        text.removeprefix("/").replace("#", "/") for text in _job(word, "image")
    ],
    "--account": lambda word: _slurm(word, "account"),
    "--qos": lambda word: _slurm(word, "qos"),
    "--time": lambda word: _slurm(word, "time"),
    # The kind of GPU before "=" is compared with the plan's and written nowhere.
    "--partition": lambda word: [
        value for _, value in slurm_options([word], [], None, None, None).partition
    ],
    "host": _host,
    "user@host": lambda word: [target.word for target in targets(word, None)],
}
"""Place of a word -> what of it goes on to files and commands."""


def _flag_faults(word: str) -> Iterator[str]:
    """A value stays one value for the table, for argparse as Megatron uses it, and for a shell."""
    try:
        option = flag_table().option("--save", word)
        argv = option.tokens
    except HeteroError:
        return
    yield from shell_faults(argv)
    if [o.values for o in flag_table().split(argv)] != [(word,)]:
        yield f"the flag table reads {argv!r} otherwise"
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--save")
    parser.add_argument("--spec", nargs="*")
    try:
        found = parser.parse_args(list(argv))
    except (argparse.ArgumentError, SystemExit):
        yield f"argparse refuses {argv!r}"
        return
    if found.save != word or found.spec is not None:
        yield f"argparse reads {argv!r} as {found}"


def _path_faults(word: str) -> Iterator[str]:
    """The plan's own path, and flags of the user's in a script that is written."""
    if "\x00" in word:  # no path or argument has it
        return
    for read in (
        lambda: megatron_args(PLAN, word),
        lambda: node_launches(PLAN, word)[0].argv,
        lambda: LaunchJob(PLAN, more_flags=("--save", word)).more_flags,
    ):
        try:
            yield from shell_faults(read())
        except HeteroError:
            continue


def entry_faults(word: str) -> Iterator[str]:
    """Find a script's name that `train.sh` does not start to the letter."""
    job = LaunchJob(PLAN, script=word)
    try:
        job.check()
        text = node_script(job).text
    except HeteroError:
        return
    start = text.index("-m megatron_hetero.launch ")
    words = shlex.split(text[start : text.index(' "${MEGATRON_ARGS[@]}"', start)])
    if words != ["-m", "megatron_hetero.launch", word] or word.startswith("-"):
        yield f"train.sh starts {words!r} instead of {word!r}"


def script_faults(plan: Plan, flags: tuple[str, ...]) -> Iterator[str]:
    """Find flags that do not stand in `train.sh` as they were given."""
    job = LaunchJob(plan, more_flags=flags)
    try:
        job.check()
        text = node_script(job).text
    except HeteroError:
        return
    rendered = text[text.index("MEGATRON_ARGS=(") :]
    for end in re.finditer(r"\n\)", rendered):
        try:
            words = shlex.split(rendered[: end.end()])
        except ValueError:  # inside a quote
            continue
        if words[-1] != ")" or words[-1 - len(flags) : -1] != list(flags):
            yield f"train.sh carries {words!r} instead of {flags!r}"
        return
    yield "train.sh has no end of its arguments"
