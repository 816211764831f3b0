"""`megatron-hetero VERB`: runs the verb's file and turns errors into exit codes.

Exit codes: 0 well; 1 a check did not pass; 2 usage; 3 no feasible plan; 4 invalid file; 5 version
or hardware mismatch; 6 a rank died; 130 interrupted.  Only the file of the verb that was typed is
imported, so that `--help` answers at once and planning never loads torch.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn, Protocol, cast

from megatron_hetero import __version__
from megatron_hetero.cli.interrupts import answered_interrupts, leave
from megatron_hetero.cli.output import COLOR_CHOICES, Output, error_object
from megatron_hetero.cli.own_stdout import own_stdout
from megatron_hetero.collector import keep_from_collector, no_collector
from megatron_hetero.errors import EXIT_INTERRUPTED, FileFormatError, HeteroError, UsageError

EXIT_BROKEN_PIPE = 141
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Faults of a disk that takes no more of the output."""

VERBS = {
    "plan": "divide a model over a cluster of unlike GPUs",
    "explain": "show a plan: stages, memory, what bounds its speed",
    "validate": "check every invariant of a plan, after editing it by hand",
    "diff": "show how two plans differ",
    "flags": "print the Megatron flags and the torchrun line of every node",
    "launch": "write the files that start a plan: ssh, Slurm, PBS, Kubernetes, SkyPilot and others",
    "simulate": "show what every GPU and link does in one step of a plan",
    "schedule": "make other orders of computations for a plan, and compare them",
    "report": "write one HTML page that explains a plan, with its figures",
    "init": "write a starter cluster.yaml from answers, names or a scheduler's list",
    "discover": "write a first cluster.yaml from the GPUs of this machine, or over ssh",
    "probe": "measure a model on this machine, so that plans use measured times",
    "doctor": "find what would hang or train wrongly, before the job starts",
    "data": "turn text into the data set that Megatron trains on",
    "ckpt": "convert Hugging Face weights to Megatron checkpoints, and back",
    "convert": "read configurations of HexiScale and FlagScale, or write them",
    "patch": "put the hook into a Megatron-LM source tree, or take it out",
    "rehearse": "run a plan on this machine's CPU, as slowly as its GPUs and links would",
    "verify": "train the plan on this machine's CPU and compare it with one process",
    "serve-plan": "choose the replicas that serve a model on a cluster of unlike GPUs",
    "serve": "serve a replica that no engine runs: stages of unlike widths and shares",
    "route": "hand requests to the replicas of a serving plan, by its weights",
}
"""Verb -> one line of help.  Verb `x-y` lives in `megatron_hetero/cli/x_y.py`."""

EPILOG = """exit codes:
  0 well   1 a check did not pass   2 usage   3 no feasible plan   4 invalid file
  5 version or hardware mismatch   6 a rank died   130 interrupted

`megatron-hetero VERB --help` tells more about each verb."""


class Verb(Protocol):
    """Interface of the module of a verb."""

    DESCRIPTION: str
    TAKES_MEGATRON_FLAGS: bool
    """True if Megatron's flags are accepted, among the verb's own or after `--`; they arrive as
    `arguments.megatron_args`."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the verb's own arguments."""

    def run(self, arguments: argparse.Namespace, output: Output) -> int:
        """Do the work and return the exit code; raise `HeteroError` for what the user can mend."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    Args:
        argv: the words after the program's name; those of this process by default.
    Raises:
        SystemExit: after `--help` and `--version` (code 0) and for unknown arguments (code 2), as
            argparse does.
    """
    # Only the verb's own file is imported.
    words = list(sys.argv[1:] if argv is None else argv)
    words, megatron_args = _split_at_double_dash(words)
    verb_name = next((word for word in words if word in VERBS), None)
    try:
        verb = _load(verb_name) if verb_name else None
    except KeyboardInterrupt:  # importing takes a noticeable moment
        print("error: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    parser = _parser(verb_name, verb, as_json="--json" in words)
    # Flags of Megatron stand among the verb's own, or behind `--`.
    if verb is not None and verb.TAKES_MEGATRON_FLAGS:
        words, found = _take_megatron_flags(words, verb)
        megatron_args = [*found, *(megatron_args or ())]
    # Without a verb `--help` and `--version` are still to be answered below.
    if verb is None:
        _refuse_unknown_verb(parser, words)
    # An empty value would be taken for the folder here, or for the default.
    if verb is not None and (place := _empty_value(words)) is not None:
        parser.error(
            f"{place} is empty, as of a shell variable that is not set: give a value, or leave the "
            "option out"
        )
    # Refuse what nobody knows, with what is near.
    arguments, unknown = parser.parse_known_args(words)
    if verb is None:
        parser.error(f"choose a verb: {', '.join(VERBS)}")
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_near_flags(unknown, verb)}")
    if megatron_args is not None and not verb.TAKES_MEGATRON_FLAGS:
        parser.error(f"{verb_name} takes no Megatron flags, so nothing may follow `--`")
    arguments.megatron_args = tuple(megatron_args or ())
    is_json = getattr(arguments, "json", False)
    output = Output(color=arguments.color, json_to_stdout=is_json)
    # Errors of ours become one line and an exit code.
    try:
        with own_stdout(is_json), output.own_warnings(), answered_interrupts(output.note):
            return verb.run(arguments, output)
    except HeteroError as error:
        return output.failed(type(error).__name__, str(error), error.exit_code)
    except KeyboardInterrupt:
        return output.failed("KeyboardInterrupt", "interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader (`| head`) has gone.
        _close_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _close_stdout()
        output.error(f"the output cannot be written: {error.strerror}")
        return FileFormatError.exit_code


def _close_stdout() -> None:
    """Keep the interpreter from complaining when it flushes at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> NoReturn:
    """Run the program `megatron-hetero`."""
    leave(main())


def _refuse_unknown_verb(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuse an unknown verb, and name the nearest verb if there is a near one."""
    # The first word that is neither an option nor the value of --color.
    typed = next((w for w in words if not w.startswith("-") and w not in COLOR_CHOICES), None)
    if typed is not None:
        from megatron_hetero.files import near_names  # loads much, and only here is it needed

        near = near_names(typed, VERBS)
        parser.error(f'there is no verb "{typed}"{near}; the verbs are {", ".join(VERBS)}')


def _near_flags(unknown: Sequence[str], verb: Verb) -> str:
    """Find the near names of flags that neither the verb nor Megatron knows."""
    from megatron_hetero.files import near_names

    known = _own_names(verb)
    if verb.TAKES_MEGATRON_FLAGS:
        from megatron_hetero.model.flag_table import flag_table

        known |= set(flag_table().by_name)
    flags = [word.partition("=")[0] for word in unknown if word.startswith("--")]
    return "".join(near_names(flag, sorted(known)) for flag in flags[:1])


def _own_names(verb: Verb) -> set[str]:
    own = argparse.ArgumentParser(add_help=True)
    verb.add_arguments(own)
    _add_color(own, default="auto")
    return {name for action in own._actions for name in action.option_strings}


def _empty_value(words: Sequence[str]) -> str | None:
    """Name the first empty word, by the word before it; None where there is none."""
    for before, word in pairwise(words):
        if not word:
            return f"the argument after {before}"
        if word.startswith("--") and word.endswith("=") and word.count("=") == 1:
            return f"the value of {word.rstrip('=')}"
    return None


def _split_at_double_dash(words: list[str]) -> tuple[list[str], list[str] | None]:
    if "--" not in words:
        return words, None
    position = words.index("--")
    return words[:position], words[position + 1 :]


def _take_megatron_flags(words: list[str], verb: Verb) -> tuple[list[str], list[str]]:
    """Take the flags of Megatron, with their values, out of a verb's own words.

    A name that both have is the verb's; what neither has is left for argparse to refuse.
    """
    from megatron_hetero.model.flag_table import flag_table

    # Names of both belong to the verb.
    own_names = _own_names(verb)
    table = flag_table()
    kept: list[str] = []
    taken: list[str] = []
    position = 0
    while position < len(words):
        name, joined, _ = words[position].partition("=")
        flag = table.by_name.get(name)
        # A word of the verb's, a value of it, or a flag that nobody knows.
        if flag is None or name in own_names:
            kept.append(words[position])
            position += 1
            continue
        # As many values as Megatron's parser takes for this flag; None is any number.
        most = 0 if joined else flag.bounds[1]
        stop = position + 1
        # Values end at the next flag.
        while (
            stop < len(words)
            and (most is None or stop - position <= most)
            and not words[stop].startswith("--")
        ):
            stop += 1
        taken += words[position:stop]
        position = stop
    return kept, taken


def _load(name: str) -> Verb:
    """Import a verb's file.  What is made while modules are loaded stays, so that the collector of
    cycles would look through it again and again for nothing."""
    with no_collector():
        verb = importlib.import_module(f"megatron_hetero.cli.{name.replace('-', '_')}")
    keep_from_collector()
    return cast(Verb, verb)


class _JsonParser(argparse.ArgumentParser):
    """A parser that reports faults of a command line as a JSON object too."""

    def error(self, message: str) -> NoReturn:
        Output(json_to_stdout=True).json(error_object("UsageError", message, UsageError.exit_code))
        super().error(message)


def _parser(
    verb_name: str | None, verb: Verb | None, *, as_json: bool = False
) -> argparse.ArgumentParser:
    """Build the parser of the whole command line, with the arguments of the verb that was typed.

    Args:
        verb_name: the verb, if one was typed.
        verb: its module.
        as_json: whether the command line asks for JSON; its faults are then reported so too.
    """
    parser = (_JsonParser if as_json else argparse.ArgumentParser)(
        prog="megatron-hetero",
        description="Plan and run NVIDIA Megatron training on GPUs that do not match.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"megatron-hetero {__version__}")
    _add_color(parser, default="auto")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    # All verbs have a parser for --help, and only the one that was typed its arguments.
    for name, summary in VERBS.items():
        verb_parser = verbs.add_parser(
            name,
            help=summary,
            description=verb.DESCRIPTION if verb and name == verb_name else summary,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        if verb and name == verb_name:
            verb.add_arguments(verb_parser)
            # No default here: it would overwrite a --color given before the verb.
            _add_color(verb_parser, default=argparse.SUPPRESS)
    return parser


def _add_color(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--color",
        choices=COLOR_CHOICES,
        default=default,
        help="colour the output; auto: on a terminal, unless NO_COLOR is set (default: auto)",
    )


if __name__ == "__main__":
    console()
