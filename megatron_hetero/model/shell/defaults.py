"""`${X:-a}`, `${X:=a}`, `${X:+a}` and `${X:?a}`: words in the place of values that are missing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.expansion import WordPiece, joined, pieces
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.lookup import elements, unset_value
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import source
from megatron_hetero.model.shell.values import Word, opaque, unknown

if TYPE_CHECKING:
    from tree_sitter import Node


def defaulted(
    shell: Shell,
    values: tuple[Word, ...],
    what: tuple[str, str, str],
    body: list[Node | str],
    is_quoted: bool,
    found: Variable | None,
) -> Iterator[WordPiece]:
    """Yield the value, or the word behind the operator.

    Args:
        what: name, index, operator.
        found: the variable, None where it is not set.
    """
    name, index, operator = what
    # Variables that bash sets have a value that no default replaces.
    if not index and (name in ("PWD", "HOME") or (found is None and shell.is_of_bash(name))):
        yield WordPiece(unset_value(shell, name) if found is None else values[0], is_quoted)
        return
    kind = operator[-1]
    is_missing = _is_missing(values, index, operator, found)
    if is_missing is None:
        # The word behind the operator may or may not stand here.
        subject = f"${{{name}[{index}]}}"
        hidden = next((word for word in values if not word.is_known), None)
        if hidden is None:
            hidden = unknown(shell.where, subject, "may be empty or not set")
        elif kind == "+":
            hidden = opaque(hidden)
        of_many = kind == "+" or index == "@"
        yield WordPiece(hidden._replace(may_split=hidden.may_split or of_many), is_quoted)
        return
    # `${X+word}` is the word where X is set, and nothing otherwise.
    if kind == "+":
        if not is_missing:
            yield from _body(shell, body, is_quoted)
        elif is_quoted and index != "@":
            yield WordPiece(Word("", shell.where), True)
        return
    if not is_missing:
        yield from elements(shell, values, index or "@", is_quoted)
        return
    # `${X?message}` ends a shell where X is not set; a plan needs its value from the user.
    if kind == "?":
        word = unset_value(shell, name)
        yield WordPiece(
            unknown(shell.where, f"${name}", "is needed") if word.is_known else word, True
        )
        return
    default = _body(shell, body, is_quoted)
    # Elements and arguments are not assigned here, only plain variables.
    if kind == "=" and not index and not name.isdecimal():
        # What is assigned is split, also where the default has quotes.
        held = joined(default, shell.where)
        shell.assign(name, [held])
        yield WordPiece(held, is_quoted)
        return
    yield from default


def _is_missing(
    values: tuple[Word, ...], index: str, operator: str, found: Variable | None
) -> bool | None:
    """Return whether a default takes the place of a value; None where that is not known."""
    is_array_without_elements = found is not None and found.is_array and not found.words
    # Neither an array without elements nor no words at all count as set.
    if found is None or is_array_without_elements or not values:
        return True
    parts = [part for word in values for part in word.parts or (word,)]
    # Blanks between words that a branch adds count as known: see `merging.merged`.
    if any(part.is_known and (part.text or "").strip() for part in parts):
        return False
    # With `:` an empty value counts as missing.
    if ":" in operator:
        is_blank = len(values) == 1 and values[0].is_known
        return values[0].text == "" if is_blank else None
    if index not in ("", "@", "*"):
        return None  # an empty element and one that is not set look alike here
    # A value that is set in one branch alone may be missing.
    return None if all(word.is_conditional or word.may_split for word in values) else False


def _body(shell: Shell, body: list[Node | str], is_quoted: bool) -> list[WordPiece]:
    """Return the word behind an operator, in which blanks stand for themselves."""
    found: list[WordPiece] = []
    for part in body:
        if is_quoted and not isinstance(part, str) and part.type == "raw_string":
            found += pieces(shell, source(part), True)
            continue
        for piece in pieces(shell, part, is_quoted):
            # Unquoted text of a default is split like the value of a variable.
            found.append(replace(piece, is_text=False) if not piece.is_quoted else piece)
    # In quotes nothing is an empty word, also in the place of all arguments.
    if is_quoted and not found:
        found.append(WordPiece(Word("", shell.where), True))
    return found
