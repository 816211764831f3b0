"""Words that a bash script would put on Megatron's command line.

Nothing is run.  The reader knows what such scripts are made of: assignments, arrays, expansions of
both (`$A`, `${A}`, `${A:-default}`, `"${ARGS[@]}"`), quotes, comments, continued lines, and `if`
where the text alone decides it (`shell.conditions`), for a script started without arguments.  What
only a running shell could know (command substitution, positional parameters, the branches of
another `if`) becomes a word without text, which is an error only where somebody needs it.
"""

from __future__ import annotations

import os.path
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_hetero.errors import ModelError
from megatron_hetero.model.shell.arithmetic import evaluated
from megatron_hetero.model.shell.conditions import Operand, ShellBody, negated, tested
from megatron_hetero.model.shell.lexer import commands
from megatron_hetero.model.shell.values import Word, assigned, concatenate, split, unknown
from megatron_hetero.model.shell.words import Command, ShellWord, WordPart
from megatron_hetero.model.spec import Unread

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<append>\+?)=")
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset", "eval", "env"}
OF_LIBRARIES = re.compile(
    "(NCCL|RCCL|GLOO|TORCH_NCCL|TORCH_GLOO|NVTE|UCX|FI|OMP|CUDA|PYTORCH|HSA|HIP)_[A-Z0-9_]+"
)
"""Names of variables that the libraries of a job read."""
_HEADS = {"for", "case", "select", "function"}
_OPENING = {"if", "while", "until", "{", *_HEADS}
_CLOSING = {"fi", "done", "esac", "}"}
_BRANCHES = {"then", "else", "elif", "do"}
_KEYWORDS = _OPENING | _CLOSING | _BRANCHES | {"!", "time"}


@dataclass(frozen=True)
class _Variable:
    """A shell variable: one value, or the elements of an array."""

    words: tuple[Word, ...]
    is_array: bool


@dataclass
class _Shell:
    """Variables so far, and the commands met, expanded; `blocks` are the bodies that are open and
    `sourced` the files that it reads, each with its line."""

    path: Path
    variables: dict[str, _Variable] = field(default_factory=dict)
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    blocks: list[ShellBody] = field(default_factory=list)
    sourced: list[str] = field(default_factory=list)

    @property
    def is_skipped(self) -> bool:
        """Return whether a branch is open that the script does not take."""
        return any(block.runs is False for block in self.blocks)

    @property
    def uncertain(self) -> str:
        """Explain why the current command may not be run; empty where it is."""
        for block in reversed(self.blocks):
            if block.runs is None:
                return f"inside the `{block.keyword}` of line {block.line}"
        return ""


@dataclass(frozen=True)
class Script:
    """What a script gives a job: the words behind `pretrain*.py`, and the variables of the job's
    libraries, known and unknown."""

    words: tuple[Word, ...]
    exports: tuple[str, ...]
    unread_exports: tuple[Unread, ...]


def read_megatron_words(path: Path, text: str) -> tuple[Word, ...]:
    """Read the words alone of `read_script`."""
    return read_script(path, text).words


def read_script(path: Path, text: str) -> Script:
    """Read Megatron's part of the command line of a script, or all words of a file of flags.

    The command is the last one that names a `pretrain*.py` (else any `.py`), and its flags are what
    follows that name.  Without such a command: the lines that begin with a flag, else all arrays
    that hold flags, in order of appearance.

    Raises:
        ModelError: the shell text is malformed (an open quote or bracket), or has no flags.
    """
    shell = _Shell(path)
    for command in commands(path, text):
        _run(shell, command)
    words = (
        _launched(shell.commands)
        or tuple(w for c in shell.commands if c[0].is_flag for w in c)
        or tuple(
            w
            for variable in shell.variables.values()
            if variable.is_array and any(word.is_flag for word in variable.words)
            for w in variable.words
        )
    )
    if not words:
        raise ModelError(
            f"{path}:1: no Megatron flags found; write them after pretrain_gpt.py, or one a line "
            "(--num-layers 32)"
        )
    return _with_exports(shell, words)


def _with_exports(shell: _Shell, words: tuple[Word, ...]) -> Script:
    """Return the script's words with the variables that it sets for NCCL, gloo and the like."""
    exports: list[str] = []
    unread: list[Unread] = []
    for name, variable in shell.variables.items():
        if not OF_LIBRARIES.fullmatch(name) or variable.is_array:
            continue
        word = variable.words[0]
        if word.text is not None and not word.reason:
            exports.append(f"{name}={word.text}")
        else:
            unread.append(Unread(name, word.where, word.reason))
    return Script(words, tuple(exports), tuple(unread))


def _run(shell: _Shell, command: Command) -> None:
    """Follow one simple command: assignments take effect, anything else is kept, expanded."""
    words, operator, is_negated = list(command.words), command.operator, False
    while words and words[0].keyword in _KEYWORDS:
        keyword = words.pop(0).keyword or ""
        if keyword in _OPENING:
            shell.blocks.append(ShellBody(keyword, command.line))
        elif keyword in _BRANCHES and shell.blocks:
            shell.blocks[-1].follow(keyword)
        elif keyword in _CLOSING and shell.blocks:
            shell.blocks.pop()
        if keyword in _HEADS:
            return
        is_negated = is_negated != (keyword == "!")
        operator = "" if keyword in ("if", "elif", "while", "until") else operator
    if shell.is_skipped:
        return
    if words and shell.blocks and shell.blocks[-1].is_condition:
        value = tested([_operand(shell, word) for word in words])
        shell.blocks[-1].add_test(operator, negated(value) if is_negated else value)
    while words and words[0].keyword in _DECLARATIONS:
        words.pop(0)
        while words and (words[0].keyword or "").startswith("-"):
            words.pop(0)
    reason = ""
    if shell.uncertain:
        reason = f"it is set {shell.uncertain}, which is not run"
    elif command.is_conditional:
        reason = f"it is set after && or || on line {command.line}, which is not run"
    while words and _assign(shell, words[0], reason):
        words.pop(0)
    expanded = tuple(word for w in words for word in _expand(shell, w))
    if expanded:
        shell.commands.append(expanded)
    if len(expanded) > 1 and expanded[0].text in ("source", "."):
        shell.sourced.append(f"{expanded[1].text or 'a file'} (line {command.line})")


def _operand(shell: _Shell, word: ShellWord) -> Operand:
    """Expand a word of a test; without arguments `$#` is 0."""
    if [piece.text for piece in word.pieces if piece.text] == ["$#"]:
        return Operand("0")
    value = _joined(shell, word.pieces, f"{shell.path}:{word.line}")
    return Operand(None if value.reason else value.text, word.quoted)


def _assign(shell: _Shell, word: ShellWord, reason: str) -> bool:
    """Execute `NAME=value`, `NAME+=value`, `NAME=( ... )`; return False when it is none of them.

    A value that is only set under a condition (`reason`) is not known; flags added to an array
    under a condition keep their text, so that a refusal can name them.
    """
    first = word.pieces[0] if word.pieces else None
    match = _ASSIGNMENT.match(first.text) if first and first.kind == "text" else None
    if first is None or match is None:
        return False
    is_array = word.elements is not None
    if word.elements is not None:
        value = tuple(w for element in word.elements for w in _expand(shell, element))
        if reason:
            value = tuple(replace(w, reason=reason, is_conditional=True) for w in value)
    else:
        rest = (WordPart("text", first.text[match.end() :]), *word.pieces[1:])
        joined = _joined(shell, rest, f"{shell.path}:{word.line}")
        value = (Word(None, joined.where, reason, is_conditional=True) if reason else joined,)
        value = (assigned(value[0], match["name"], word.line),)
    known = shell.variables.get(match["name"])
    if match["append"] and known is not None:
        is_array = is_array or known.is_array
        value = known.words + value if is_array else (concatenate(known.words + value),)
    shell.variables[match["name"]] = _Variable(value, is_array)
    return True


def _expand(shell: _Shell, word: ShellWord) -> tuple[Word, ...]:
    """Expand a word to words: none, one, or many; those of one variable were written where it is
    assigned."""
    where = f"{shell.path}:{word.line}"
    arrays = [p for p in word.pieces if p.kind == "array"]
    if arrays and not any(p.text for p in word.pieces if p.kind != "array"):
        elements = shell.variables.get(arrays[0].text, _Variable((), True)).words
        return tuple(w for e in elements for w in (split(e) if word.splits else (e,)))
    written = [p for p in word.pieces if p.kind != "text" or p.text]
    if len(written) == 1 and written[0].kind == "variable" and written[0].text in shell.variables:
        assigned_to = shell.variables[written[0].text].words
        where = assigned_to[0].where if assigned_to else where
    joined = _joined(shell, word.pieces, where)
    return split(joined) if word.splits else (joined,)


def _joined(shell: _Shell, pieces: tuple[WordPart, ...], where: str) -> Word:
    return replace(concatenate(tuple(_value(shell, p, where) for p in pieces)), where=where)


def _value(shell: _Shell, piece: WordPart, where: str) -> Word:
    """Expand a piece to one word."""
    if piece.kind == "text":
        return Word(piece.text, where)
    if piece.kind == "unknown":
        if piece.text.startswith("$((") and piece.text.endswith("))"):
            return evaluated(
                piece.text[3:-2],
                where,
                lambda name: _value(shell, WordPart("variable", name), where),
            )
        return unknown(where, piece.text, "is not run")
    variable = shell.variables.get(piece.text)
    is_empty = variable is not None and all(w.text == "" for w in variable.words)
    if piece.default is not None and (variable is None or (is_empty and ":" in piece.operator)):
        default = _joined(shell, piece.default, where)
        if "=" in piece.operator:
            shell.variables[piece.text] = _Variable((default,), False)
        return default
    if variable is None:
        return _unset(shell, piece.text, where)
    if piece.kind == "array":
        spaced = (w for element in variable.words for w in (Word(" ", where), element))
        return concatenate(tuple(spaced)[1:])
    return variable.words[0] if variable.words else Word("", where)


def _unset(shell: _Shell, name: str, where: str) -> Word:
    if name.isdecimal():
        return unknown(where, f"${name}", "is an argument of the script")
    sourced = "".join(f"; perhaps in {file}, which is not read" for file in shell.sourced)
    return unknown(where, f"${name}", f"is not set in the script{sourced}")


def _launched(commands: list[tuple[Word, ...]]) -> tuple[Word, ...]:
    """Return the words that follow the training script in the last command that has one."""
    found: dict[bool, tuple[Word, ...]] = {}
    for command in commands:
        words = tuple(_unwrapped(command))
        for i, word in enumerate(words):
            if word.text is None or not word.text.endswith(".py"):
                continue
            if any(w.is_flag for w in words[i + 1 :]):
                is_pretrain = os.path.basename(word.text).startswith("pretrain")
                found[is_pretrain] = words[i + 1 :]
                break
    return found.get(True) or found.get(False) or ()


def _unwrapped(command: tuple[Word, ...]) -> Iterator[Word]:
    """Split a command line inside one word (`srun sh -c "torchrun ..."`) into words of its own."""
    for word in command:
        if word.text is None or not re.search(r"\.py\s", word.text):
            yield word
            continue
        try:
            yield from (replace(word, text=text) for text in shlex.split(word.text))
        except ValueError:
            yield word  # prose with an apostrophe, not a command line
