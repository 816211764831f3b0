"""Words that a bash script would put on Megatron's command line.

Nothing is run: the script's text is followed as bash would run it (`model.shell`).  What only a
running shell could know (an unset variable, the output of a program, a branch that these decide)
becomes a word without text, and whatever may hold flags is named (`Unread`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hetero.errors import ModelError, UsageError
from megatron_hetero.files import near_names
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.model.launched import training_command
from megatron_hetero.model.shell.children import is_script
from megatron_hetero.model.shell.fields import split
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import Word, file_name
from megatron_hetero.model.unread import Unread

OF_LIBRARIES = re.compile(
    "(NCCL|RCCL|GLOO|TORCH_NCCL|TORCH_GLOO|NVTE|UCX|FI|OMP|CUDA|PYTORCH|HSA|HIP)_[A-Z0-9_]+"
)
"""Names of variables that the libraries of a job read."""

_CUT = re.compile(r"^(?![ \t]*#)[^\n]*(?<!\\)\\[ \t]+\n[ \t]*--[a-z]", re.MULTILINE)
"""A line that goes on in the next line, with a flag, to the eye alone."""

_PLACEHOLDER = re.compile(r"(?<!<)<[A-Za-z].* is not understood$")
"""A part with a value that its author left to the reader: `DATA_PATH=<Specify path>`."""


@dataclass(frozen=True)
class Script:
    """What a script gives a job: the words behind `pretrain*.py`, the variables of the job's
    libraries, and what of both only a running shell knows."""

    words: tuple[Word, ...]
    exports: tuple[str, ...]
    unread: tuple[Unread, ...]


def read_megatron_words(path: Path, text: str) -> tuple[Word, ...]:
    """Read the words alone of `read_script`."""
    return read_script(path, text).words


def read_script(
    path: Path,
    text: str,
    arguments: Sequence[str] = (),
    given: Mapping[str, str | None] | None = None,
) -> Script:
    """Read Megatron's part of the command line of a script, or all words of a file of flags.

    The command is the last one that starts training (`model.launched`).  Without any: the lines
    that begin with a flag, else all variables that hold flags, in order of appearance.

    Args:
        arguments: what the script is started with.
        given: variables of the environment; None for one that is not set there.
    Raises:
        ModelError: the text is no script that can be followed, or has no flags.
        UnsupportedError: it trains another model than a GPT.
        UsageError: it reads no variable of a name in `given`.
    """
    if path.suffix == ".py":
        raise ModelError(
            f"{path}:1: this is a Python program, which is not run here; write the flags that it "
            "gives Megatron into a file, one a line (--num-layers 32), and name that file"
        )
    # The grammar is loaded for scripts alone.
    from megatron_hetero.model.shell.statements import run
    from megatron_hetero.model.shell.tree import parsed_script

    # The whole script is followed once; commands that it starts are then in `records`.
    shell = _shell(path, arguments, given or {})
    run(shell, parsed_script(path, text))
    records = shell.records
    records.texts.append(text)
    _check_given(path, given or {}, shell)
    _note_cut_lines(shell, text)
    # The command that starts training, if there is one, has all the flags.
    launch, notes = training_command(records.started)
    if launch is not None:
        launch.check_model()
        return _with_exports(
            shell, launch.words, (*notes, *records.unread), launch.command.settings
        )
    # A file of flags has lines that begin with a flag, which the grammar takes for commands.
    words = tuple(w for c in records.started if c.words[0].is_flag for w in c.words)
    # A file that only sets variables is to be sourced: the flags are in these.
    if not words:
        words, notes = _of_variables(shell)
    if not words:
        raise ModelError(_nothing_found(path, shell))
    return _with_exports(shell, words, (*notes, *records.unread), ())


def _check_given(path: Path, given: Mapping[str, str | None], shell: Shell) -> None:
    """Refuse a variable that stands in no file that was followed; a script with parts that are not
    read may read it there, and the libraries of a job read theirs."""
    if shell.records.unread:
        return
    text = "\n".join(shell.records.texts)
    for name in given:
        if not OF_LIBRARIES.fullmatch(name) and not re.search(rf"\b{name}\b", text):
            near = near_names(name, re.findall(r"\$\{?([A-Za-z_]\w*)", text))
            raise UsageError(f"--model-env {name}: {path} reads no variable of that name{near}")


def _note_cut_lines(shell: Shell, text: str) -> None:
    """Note where a command ends before flags that seem to belong to it."""
    for match in _CUT.finditer(text):
        shell.where = f"{shell.script}:{text.count(chr(10), 0, match.start()) + 1}"
        shell.note("", "the blank behind the backslash ends the command before the flags below")


def _shell(path: Path, arguments: Sequence[str], given: Mapping[str, str | None]) -> Shell:
    variables = {
        name: Variable((Word(value, "--model-env"),))
        for name, value in given.items()
        if value is not None
    }
    return Shell(
        path,
        path,
        f"{path}:1",
        variables,
        arguments=tuple(Word(text, "--model") for text in arguments),
        # Without arguments on our command line, `$1` may be anything that a user gives.
        knows_arguments=bool(arguments),
        unset=frozenset(name for name, value in given.items() if value is None),
        exported=dict.fromkeys(variables, ""),
    )


def _of_variables(shell: Shell) -> tuple[tuple[Word, ...], tuple[Unread, ...]]:
    """Return the words of all variables with flags, for a file that starts no command."""
    # Words by variable; a plain value is split at blanks, as it will be where it is used.
    held = {
        name: [w for word in v.words for w in ((word,) if v.is_array else split(word))]
        for name, v in shell.variables.items()
    }
    held = {name: words for name, words in held.items() if any(w.is_flag for w in words)}
    table = flag_table().by_name
    # Variables with flags of Megatron; those of another program, as of torchrun, are left out.
    of_megatron = {
        name: words
        for name, words in held.items()
        if any(w.is_flag and (w.text or "").partition("=")[0] in table for w in words)
    }
    # Without any flag that Megatron knows, variables that begin with a flag are read.
    held = of_megatron or {name: words for name, words in held.items() if words[0].is_flag}
    words = tuple(word for found in held.values() for word in found)
    if any(part.reason.endswith("is not understood") for part in shell.records.unread):
        return (), ()  # where training starts may stand in that part
    programs = [started for started in shell.records.started if started.words[0].text is not None]
    if not programs or not words:
        return words, ()
    # Programs run, and none of them surely trains: the user should see what is read.
    note = f"no command here starts training; the flags of {', '.join(held)} are read"
    return words, (Unread("", programs[-1].where, note),)


def _nothing_found(path: Path, shell: Shell) -> str:
    records = shell.records
    lines = [
        f"{path}:1: no Megatron flags found; write them after pretrain_gpt.py, or one a line "
        "(--num-layers 32)"
    ]
    # A script that ends by itself before training explains the missing flags best.
    if records.ended:
        lines = [
            f"{records.ended} ends the script before it starts training; give the arguments and "
            'variables that it wants: --model "run.sh ARGUMENT", --model-env NAME=VALUE'
        ]
    lines += [f"{part.where}: {part.reason}" for part in records.unread[:5]]
    if any(map(_PLACEHOLDER.search, (part.reason for part in records.unread))):
        lines.append("bash takes < and > for files to read and write: put values in place of <...>")
    lines += [
        f"{started.where}: {name} is started, and its text is not known here: name that file itself"
        for started in records.started
        for name in [file_name(word) for word in started.words if is_script(file_name(word))][:1]
    ][:5]
    return "\n".join(lines)


def _with_exports(
    shell: Shell,
    words: tuple[Word, ...],
    unread: tuple[Unread, ...],
    settings: Sequence[tuple[str, Word]],
) -> Script:
    """Return the script's words with the variables set for NCCL, gloo and the like."""
    exports: list[str] = []
    parts = list(unread)
    # Values that variables have at the end of the script; arrays cannot be exported.
    values = {name: v.words[0] for name, v in shell.variables.items() if v.words and not v.is_array}
    # The command's own settings (`NCCL_X=1 torchrun ...`) are the last word.
    for name, word in {**values, **dict(settings)}.items():
        if not OF_LIBRARIES.fullmatch(name):
            continue
        if word.is_known:
            exports.append(f"{name}={word.text}")
        else:
            parts.append(Unread(name, word.where, word.reason))
    return Script(words, tuple(exports), tuple(dict.fromkeys(parts)))
