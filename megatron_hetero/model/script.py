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
from megatron_hetero.model.shell.conditions import Operand, ShellBody, negated, tested
from megatron_hetero.model.shell.lexer import commands
from megatron_hetero.model.shell.words import Command, ShellWord, WordPart

_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?P<append>\+?)=")
_DECLARATIONS = {"export", "declare", "local", "readonly", "typeset", "eval", "env"}
_HEADS = {"for", "case", "select", "function"}
_OPENING = {"if", "while", "until", "{", *_HEADS}
_CLOSING = {"fi", "done", "esac", "}"}
_BRANCHES = {"then", "else", "elif", "do"}
_KEYWORDS = _OPENING | _CLOSING | _BRANCHES | {"!", "time"}


@dataclass(frozen=True)
class Word:
    """One word of a command line, and where it was written.

    A `reason` says why the shell would have to be run to know the word; `text` is then what it may
    be, or None.  `is_conditional`: the script sets it, but only under a condition.
    """

    text: str | None
    where: str
    reason: str = ""
    is_conditional: bool = False

    @property
    def is_flag(self) -> bool:
        """Return whether it begins a flag (`--x`, but not a bare `--` nor a negative number)."""
        return self.text is not None and re.match(r"--[A-Za-z]", self.text) is not None


@dataclass(frozen=True)
class _Variable:
    """A shell variable: one value, or the elements of an array."""

    words: tuple[Word, ...]
    is_array: bool


@dataclass
class _Shell:
    """Variables so far, and the commands met, expanded; `blocks` are the bodies that are open."""

    path: Path
    variables: dict[str, _Variable] = field(default_factory=dict)
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    blocks: list[ShellBody] = field(default_factory=list)

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


def read_megatron_words(path: Path, text: str) -> tuple[Word, ...]:
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
    return words


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
    known = shell.variables.get(match["name"])
    if match["append"] and known is not None:
        is_array = is_array or known.is_array
        value = known.words + value if is_array else (_concatenate(known.words + value),)
    shell.variables[match["name"]] = _Variable(value, is_array)
    return True


def _expand(shell: _Shell, word: ShellWord) -> tuple[Word, ...]:
    """Expand a word to words: none, one, or many."""
    where = f"{shell.path}:{word.line}"
    arrays = [p for p in word.pieces if p.kind == "array"]
    if arrays and not any(p.text for p in word.pieces if p.kind != "array"):
        elements = shell.variables.get(arrays[0].text, _Variable((), True)).words
        return tuple(w for e in elements for w in (_split(e) if word.splits else (e,)))
    joined = _joined(shell, word.pieces, where)
    return _split(joined) if word.splits else (joined,)


def _split(word: Word) -> tuple[Word, ...]:
    """Split the value of an unquoted expansion at blanks, as the shell does."""
    if word.text is None:
        return (word,)
    return tuple(replace(word, text=text) for text in word.text.split())


def _joined(shell: _Shell, pieces: tuple[WordPart, ...], where: str) -> Word:
    return replace(_concatenate(tuple(_value(shell, p, where) for p in pieces)), where=where)


def _concatenate(parts: tuple[Word, ...]) -> Word:
    texts = []
    for part in parts:
        if part.text is None or part.reason:
            return replace(part, text=None)
        texts.append(part.text)
    return Word("".join(texts), parts[0].where if parts else "")


def _value(shell: _Shell, piece: WordPart, where: str) -> Word:
    """Expand a piece to one word."""
    if piece.kind == "text":
        return Word(piece.text, where)
    if piece.kind == "unknown":
        return Word(None, where, f"{piece.text} is not run")
    variable = shell.variables.get(piece.text)
    is_empty = variable is not None and all(w.text == "" for w in variable.words)
    if piece.default is not None and (variable is None or (is_empty and ":" in piece.operator)):
        default = _joined(shell, piece.default, where)
        if "=" in piece.operator:
            shell.variables[piece.text] = _Variable((default,), False)
        return default
    if variable is None:
        return Word(None, where, f"${piece.text} is not set in the script")
    if piece.kind == "array":
        spaced = (w for element in variable.words for w in (Word(" ", where), element))
        return _concatenate(tuple(spaced)[1:])
    return variable.words[0] if variable.words else Word("", where)


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
