"""What `$NAME`, `$1`, `$#` and `"${NAME[@]}"` hold: words, or the reason why they are not known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from megatron_hetero.model.shell.arithmetic import evaluated
from megatron_hetero.model.shell.expansion import WordPiece, in_quotes
from megatron_hetero.model.shell.fields import spaced
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.names import set_in_arithmetic
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.values import Word, concatenate, opaque, unknown


def lookup(shell: Shell, name: str) -> Variable | None:
    """Return what `$NAME` or `$1` holds; None where the script does not say."""
    where = shell.where
    if name in ("@", "*"):
        return Variable(shell.arguments, True)
    # The number of arguments is open if one may be none or several words.
    if name == "#":
        uncertain = [word for word in shell.arguments if word.may_split]
        if uncertain:
            return Variable((opaque(uncertain[0]),))
        return Variable((Word(str(len(shell.arguments)), where),))
    # A relative path of the script is right from the folder in which the planner is started.
    if name in ("0", "BASH_SOURCE"):
        path = shell.script if name == "0" else shell.path
        reason = f"${name} depends on where the script lies"
        return Variable((Word(str(path), where, reason, subject=f"${name}"),))
    if name.isdecimal():
        # Arguments up to the number asked for decide which of them has that number.
        uncertain = [word for word in shell.arguments[: int(name)] if word.may_split]
        if uncertain:
            return Variable((opaque(uncertain[0]),))
        if int(name) <= len(shell.arguments):
            return Variable((shell.arguments[int(name) - 1],))
        return None
    # Status, process numbers and options exist only while a shell runs.
    if name in "?$!-":
        return Variable((unknown(where, f"${name}", "is not run"),))
    return shell.variables.get(name)


def unset_value(shell: Shell, name: str) -> Word:
    """Return the value of what the script does not set."""
    if name.isdecimal():
        if shell.knows_arguments:
            return Word("", shell.where)
        return unknown(shell.where, f"${name}", "is an argument of the script")
    return shell.unset_word(name)


def scalar(shell: Shell, name: str, where: str = "") -> Word:
    """Return the value of `$NAME`: of an array, its first element."""
    where = where or shell.where
    found = lookup(shell, name)
    if found is None:
        return unset_value(shell, name)._replace(where=where)
    # In a table `$A` is the element with the key 0, if there is one.
    if found.keys is not None:
        return next(
            (w for k, w in zip(found.keys, found.words, strict=True) if k == "0"),
            Word("", where),
        )
    if not found.words:
        return Word("", where)
    # Where the first word may be none or several, the first element may be another one.
    first = found.words[0]
    return opaque(first) if found.is_array and first.may_split else first


def calculated(shell: Shell, text: str) -> Word:
    """Evaluate an arithmetic expression, and the assignments in it."""
    # Bash drops the double quotes of arithmetic, `${A["0"]}`.
    word = in_quotes(shell, text.replace('"', ""))
    if not word.is_known:
        shell.forget(set_in_arithmetic(text), "is set by arithmetic that is not run")
        return opaque(next(part for part in word.parts or (word,) if not part.is_known))
    found = evaluated(
        word.text or "",
        shell.where,
        lambda name: scalar(shell, name),
        lambda name, number: shell.assign(name, [Word(number, shell.where)]),
    )
    if not found.is_known:
        # Where the evaluation ends is open, and with it what is set before and behind.
        shell.forget(set_in_arithmetic(word.text or ""), "is set by arithmetic that is not run")
    if found.subject.startswith("$(("):
        # Bash leaves the whole statement after an error.
        shell.note("", found.reason)
    return found


def elements(
    shell: Shell, words: Sequence[Word], which: str, is_quoted: bool
) -> Iterator[WordPiece]:
    """Yield the elements of an array: `"${A[*]}"` joins them."""
    blank = Word(" ", shell.where)
    variable = shell.variables.get("IFS")
    # `"${A[*]}"` joins with the first character of IFS.
    if which == "*" and variable is not None and variable.words:
        first = variable.words[0]
        # An IFS that is set but empty joins without a blank.
        blank = first._replace(text=first.text[:1]) if first.text is not None else first
    parts = spaced(words, blank)
    if which == "*" and is_quoted:
        yield WordPiece(concatenate(parts or [Word("", shell.where)]), True)
        return
    # Words and the blanks between alternate; a blank ends the word before.
    for word, end in itertools.zip_longest(parts[::2], parts[1::2]):
        yield WordPiece(word, is_quoted, end=end)
