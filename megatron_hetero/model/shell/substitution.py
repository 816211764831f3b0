"""Output of `$(...)`, where it comes from text alone: `echo`, `dirname`, `cut`, `cat`."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.arithmetic import evaluated
from megatron_hetero.model.shell.code import beside
from megatron_hetero.model.shell.fields import as_unknown
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import bare_source
from megatron_hetero.model.shell.values import Word, concatenate, shown_path, unknown

if TYPE_CHECKING:
    from tree_sitter import Node

_MOST_NUMBERS = 4096


def substituted(
    shell: Shell, node: Node, run_all: Callable[[Shell, Sequence[Node]], object]
) -> Word:
    """Return the output of the commands in a substitution, without the newlines at the end."""
    where = shell.line_at(node)
    not_run = unknown(where, bare_source(node), "is not run")
    # `$(< file)` is not followed, nor what the grammar does not understand.
    if node.has_error or any(child.type == "file_redirect" for child in node.children):
        return not_run
    # Commands of a substitution run in a copy: what they set is lost behind it.
    apart = shell.fork()
    apart.is_captured, apart.output = True, []
    apart.stops_at_errors = shell.stops_at_errors and shell.inherits_errexit
    # Backslashes between backquotes are taken away once more before the code is read.
    if bare_source(node).startswith("`") and "\\" in bare_source(node):
        return not_run
    run_all(apart, node.children[1:-1])
    shell.given = apart.given
    output: list[Word] | None = apart.output
    # A branch that ends in `return` may have printed something else.
    if output is None or apart.returned:
        return not_run
    # Only of `echo` and `printf` is it certain that nothing printed means an empty text.
    if not output:
        return Word("", where) if _only_prints(node) else not_run
    return concatenate(_without_newlines(output))._replace(where=where)


def _without_newlines(output: Sequence[Word]) -> list[Word]:
    """Drop the newlines at the end of an output.

    If what is printed last may be nothing, the newlines before may be at the end, too.
    """
    # Parts from the last to the first; `hidden` is the first unknown one met.
    parts = [part for word in output for part in word.parts or (word,)]
    hidden: Word | None = None
    for i in range(len(parts))[::-1]:
        part = parts[i]
        text = (part.text or "").rstrip("\n")
        if not part.is_known:
            # An unknown part with a text may be that text: its own newlines end there too.
            if part.text is not None and hidden is None:
                parts[i] = part = part._replace(text=text)
            # This part may be empty, and then the newlines before it are at the end.
            if text or part.text is None:
                hidden = hidden or part
            continue
        newlines = (part.text or "")[len(text) :]
        kept = [part._replace(text=text)]
        # Newlines before an unknown part stay only if that part is not empty.
        if newlines and hidden is not None:
            kept.append(as_unknown(part._replace(text=newlines), hidden))
        parts[i : i + 1] = kept
        # Text that is surely printed ends the search: what stands before is inside the output.
        if text:
            break
    return [part for part in parts if part.text != "" or part.is_known]


def _only_prints(node: Node) -> bool:
    return bool(re.match(r"\$\(\s*(echo|printf)\b", bare_source(node)))


def _one_path(words: Sequence[Word]) -> Word | None:
    # Options change the form of the output (`realpath -m`), not the path that is followed.
    given = [word for word in words if not (word.text or "").startswith("-")]
    return given[0] if len(given) == 1 else None


def _of_path(change: Callable[[str], str]) -> Callable[[Shell, Sequence[Word]], Word | None]:
    def changed(shell: Shell, words: Sequence[Word]) -> Word | None:
        word = _one_path(words)
        path = None if word is None else shown_path(word)
        if word is None or path is None:
            return None
        # The path is that of a script started where it lies, and stays as uncertain as its parts.
        parts = word.parts or (word,)
        hidden = next((part for part in parts if not part.is_known), word)
        return hidden._replace(text=change(path) + "\n", parts=())

    return changed


def _last_part(path: str) -> str:
    """Return what `basename` prints: of `/` itself the slash, of nothing nothing."""
    return os.path.basename(path.rstrip("/")) or path[:1]


def _basename(shell: Shell, words: Sequence[Word]) -> Word | None:
    # `basename path suffix` cuts the suffix off, unless nothing would be left.
    if len(words) == 2 and all(word.is_known for word in words):
        name, suffix = _last_part(words[0].text or ""), words[1].text or ""
        cut = name[: -len(suffix)] if suffix and name.endswith(suffix) and name != suffix else name
        return Word(cut + "\n", shell.where)
    return _of_path(_last_part)(shell, words)


def _pwd(shell: Shell, words: Sequence[Word]) -> Word | None:
    if shell.folder is None or shown_path(shell.folder) is None:
        return None
    return _of_path(os.path.abspath)(shell, [shell.folder])


def _cut(shell: Shell, words: Sequence[Word]) -> Word | None:
    """Follow `cut -d SEPARATOR -f NUMBER`."""
    given = shell.given
    # An unknown word becomes a character that the pattern has not.
    text = " ".join(word.text or "\0" for word in words)
    match = re.fullmatch(r"(?:-d ?(\S) -f ?(\d+)|-f ?(\d+) -d ?(\S))", text)
    if given is None or not given.is_known or match is None:
        return None
    separator, number = match[1] or match[4], int(match[2] or match[3])
    lines = (given.text or "").splitlines()
    cut = [line.split(separator) for line in lines]
    # A line without the separator is printed whole, as `cut` does without `-s`.
    found = [p[0] if len(p) == 1 else p[number - 1] if number <= len(p) else "" for p in cut]
    return Word("".join(f"{line}\n" for line in found), shell.where) if number else None


def _tr(shell: Shell, words: Sequence[Word]) -> Word | None:
    """Follow `tr a b`, of two characters, `tr -d a`, and the two that change the case."""
    given, texts = shell.given, [word.text or "" for word in words]
    if given is None or not given.is_known or not all(word.is_known for word in words):
        return None
    text = given.text or ""
    match texts:
        # Ranges of letters mean ASCII in any locale only if the text is ASCII.
        case ["a-z" | "[:lower:]" | "[a-z]", "A-Z" | "[:upper:]" | "[A-Z]"] if text.isascii():
            return Word(text.upper(), shell.where)
        case ["A-Z" | "[:upper:]" | "[A-Z]", "a-z" | "[:lower:]" | "[a-z]"] if text.isascii():
            return Word(text.lower(), shell.where)
        case ["-d", one] if len(one) == 1 and one != "\\":
            return Word(text.replace(one, ""), shell.where)
        case [one, other] if len(one) == len(other) == 1 and "\\" not in one + other:
            return Word(text.replace(one, other), shell.where)
    return None


def _expr(shell: Shell, words: Sequence[Word]) -> Word | None:
    texts = [word.text or "" for word in words]
    # Other operators of `expr` compare texts, and are not read.
    if not all(word.is_known for word in words) or len(texts) != 3:
        return None
    if texts[1] not in tuple("+-*/%"):
        return None
    # A number such as `010` is decimal in `expr` and octal in `$(( ))`.
    if not all(re.fullmatch(r"-?[1-9]\d*|0", number) for number in texts[::2]):
        return None
    found = evaluated(" ".join(texts), shell.where, lambda name: Word("", shell.where))
    return found._replace(text=f"{found.text}\n") if found.is_known else None


def _seq(shell: Shell, words: Sequence[Word]) -> Word | None:
    numbers = [word.text or "" for word in words if word.is_known]
    if len(numbers) < len(words) or not all(re.fullmatch(r"-?\d{1,9}", n) for n in numbers):
        return None
    match list(map(int, numbers)):
        case [last]:
            found = range(1, last + 1)
        case [first, last]:
            found = range(first, last + 1)
        case [first, step, last] if step:
            # A negative step counts down, and includes `last` too.
            found = range(first, last + (1 if step > 0 else -1), step)
        case _:
            return None
    if len(found) > _MOST_NUMBERS:
        return None
    return Word("".join(f"{number}\n" for number in found), shell.where)


def _cat(shell: Shell, words: Sequence[Word]) -> Word | None:
    """Follow `cat` of its input, or of a file at the place where a sourced one would be."""
    if not words:
        return shell.given
    found = beside(shell, words[0]) if len(words) == 1 else None
    if found is None or (words[0].text or "").startswith("-"):
        return None
    return Word(found[1], shell.where)


def _dirname(path: str) -> str:
    return os.path.dirname(path.rstrip("/")) or ("/" if path[:1] == "/" else ".")


FILTERS: dict[str, Callable[[Shell, Sequence[Word]], Word | None]] = {
    "dirname": _of_path(_dirname),
    "basename": _basename,
    "realpath": _of_path(os.path.abspath),
    "readlink": _of_path(os.path.abspath),
    "pwd": _pwd,
    "cut": _cut,
    "tr": _tr,
    "expr": _expr,
    "seq": _seq,
    "cat": _cat,
}
"""Programs with an output that follows from words and input."""
