"""What `read` and `mapfile` take from the input of commands."""

from __future__ import annotations

import re

from megatron_hetero.model.shell.code import unknown_array
from megatron_hetero.model.shell.fields import split
from megatron_hetero.model.shell.printing import may_be_option
from megatron_hetero.model.shell.splitting import field_separators
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import BLANKS, Status, Word, Words

_NAME = re.compile(r"[A-Za-z_]\w*")
_PLAIN = re.compile(r"(-[ra]+)*")
"""Options of `read` that are followed."""


def read(shell: Shell, words: Words) -> Status:
    """Follow `read`: one line of the input, cut into words, goes to the names."""
    # An unknown word may be an option, which the `?` makes none of those read below.
    options = "".join(w.text or "?" for w in words if may_be_option(w))
    if any(not word.is_known for word in words):
        shell.note("", "read may set a variable whose name is not known")
    names = [w.text or "" for w in words if not may_be_option(w)] or ["REPLY"]
    names = [name for name in names if _NAME.fullmatch(name)]
    given, separators = shell.given, field_separators(shell)
    # A line without its end is read too, and `read` fails.
    line, end, rest = ("" if given is None else given.text or "").partition("\n")
    # Without `-r` a backslash joins or quotes, which is not followed.
    is_plain = _PLAIN.fullmatch(options) and ("r" in options or "\\" not in line)
    if given is None or not given.is_known or not is_plain or not isinstance(separators, str):
        _forget_input(shell)
        shell.forget(names, "is read from the input of the script")
        return None
    shell.given = given._replace(text=rest)
    status = bool(end)
    found = split(Word(line, shell.where), separators)
    # A mark at the end of the line ends a word, or belongs to the last name.
    ends_in_mark = found and line[-1] not in BLANKS and line[-1] in separators
    # `-a` puts all words into one array.
    if "a" in options and names:
        shell.assign(names[0], found, is_array=True)
    elif len(found) > len(names) or ends_in_mark:
        # Words that are left over would have to be joined with their own separators again.
        shell.forget(names, "is read from the input of the script")
    else:
        for i, name in enumerate(names):
            shell.assign(name, [found[i] if i < len(found) else Word("", shell.where)])
    return status


def mapfile(shell: Shell, words: Words) -> Status:
    """Follow `mapfile`: each line of the input is an element."""
    texts = [word.text if word.is_known else None for word in words]
    if None in texts:
        shell.note("", "mapfile may set an array whose name is not known")
    name = texts[-1] if texts and _NAME.fullmatch(texts[-1] or "") else "MAPFILE"
    given = shell.given
    if given is not None and given.is_known and texts in (["-t", name], [name], ["-t"], []):
        lines = (given.text or "").splitlines(keepends=True)
        if "-t" in texts:
            lines = [line.removesuffix("\n") for line in lines]
        # Other characters than a newline end no line.
        if not re.search(r"[\r\v\f\x1c-\x1e\x85\u2028\u2029]", given.text or ""):
            shell.given = given._replace(text="")
            shell.assign(name or "", [Word(line, shell.where) for line in lines], is_array=True)
            return True
    reason = f"{name} is read from the input of the script"
    _forget_input(shell)
    unknown_array(shell, name or "", Word(None, shell.where, reason, True, may_split=True))
    return None


def _forget_input(shell: Shell) -> None:
    """Take the rest of the input for unknown."""
    if shell.given is not None:
        shell.given = Word(None, shell.where, "the input is read in part")
