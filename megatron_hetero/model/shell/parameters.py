"""Values of `$X` and `${X...}`: defaults, lengths, parts, replacements, elements of arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.arithmetic import evaluated
from megatron_hetero.model.shell.expansion import (
    EXPANDERS,
    WordPiece,
    in_quotes,
    joined,
    pattern,
    pieces,
)
from megatron_hetero.model.shell.patterns import matches, trimmed
from megatron_hetero.model.shell.state import Shell, Variable
from megatron_hetero.model.shell.tree import bare_source, covered, source
from megatron_hetero.model.shell.values import Word, concatenate, unknown

if TYPE_CHECKING:
    from tree_sitter import Node

_LONGEST = 4096
"""Characters of a text in which patterns are looked for."""
_CASES = {"^^": str.upper, ",,": str.lower}


def lookup(shell: Shell, name: str) -> Variable | None:
    """Return what `$NAME` or `$1` holds; None where the script does not say."""
    where = shell.where
    if name in ("@", "*"):
        return Variable(shell.arguments, True)
    if name == "#":
        uncertain = [word for word in shell.arguments if word.may_split]
        if uncertain:
            return Variable((replace(uncertain[0], text=None, parts=(), may_split=False),))
        return Variable((Word(str(len(shell.arguments)), where),))
    if name in ("0", "BASH_SOURCE"):
        path = shell.script if name == "0" else shell.path
        reason = f"${name} depends on where the script lies"
        return Variable((Word(str(path), where, reason, subject=f"${name}"),))
    if name.isdecimal():
        uncertain = [word for word in shell.arguments[: int(name)] if word.may_split]
        if uncertain:
            return Variable((replace(uncertain[0], text=None, parts=(), may_split=False),))
        if int(name) <= len(shell.arguments):
            return Variable((shell.arguments[int(name) - 1],))
        return None
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


def number_of(shell: Shell, name: str) -> Word:
    """Return a variable's value for arithmetic."""
    found = lookup(shell, name)
    if found is None or not found.words:
        return unset_value(shell, name) if found is None else Word("", shell.where)
    return found.words[0]


def calculated(shell: Shell, text: str) -> Word:
    """Evaluate an arithmetic expression, and the assignments in it."""
    word = in_quotes(shell, text)
    if not word.is_known:
        hidden = next(part for part in word.parts or (word,) if not part.is_known)
        return replace(hidden, text=None)
    found = evaluated(
        word.text or "",
        shell.where,
        lambda name: number_of(shell, name),
        lambda name, number: shell.assign(name, [Word(number, shell.where)]),
    )
    if found.subject.startswith("$(("):
        # Bash leaves the whole statement after an error.
        shell.note("", found.reason)
    return found


def _simple(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    name = bare_source(node)[1:]
    if name in ("@", "*"):
        yield from _elements(shell, shell.arguments, name, is_quoted)
        return
    yield WordPiece(replace(_scalar(shell, name, node), may_split=False), is_quoted)


def _scalar(shell: Shell, name: str, node: Node) -> Word:
    found = lookup(shell, name)
    if found is None:
        return replace(unset_value(shell, name), where=shell.line_at(node))
    if found.keys is not None:
        return next(
            (w for k, w in zip(found.keys, found.words, strict=True) if k == "0"),
            Word("", shell.where),
        )
    return found.words[0] if found.words else Word("", shell.line_at(node))


def _elements(
    shell: Shell, words: Sequence[Word], which: str, is_quoted: bool
) -> Iterator[WordPiece]:
    """Yield the elements of an array: `"${A[*]}"` joins them."""
    if which == "*" and is_quoted:
        variable = shell.variables.get("IFS")
        separator = Word(" ", shell.where)
        if variable is not None and variable.words:
            first = variable.words[0]
            separator = replace(first, text=first.text[:1]) if first.text is not None else first
        spaced = [word for element in words for word in (separator, element)]
        yield WordPiece(concatenate(spaced[1:] or [Word("", shell.where)]), True)
        return
    for i, word in enumerate(words):
        yield WordPiece(word, is_quoted, ends_field=i + 1 < len(words))


def _expansion(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    """Read `${...}`."""
    children = list(node.children)
    not_read = unknown(shell.line_at(node), bare_source(node), "is not run")
    if node.has_error or len(children) < 3 or children[-1].type != "}":
        yield WordPiece(not_read, is_quoted)
        return
    # The name, with `#` for a length or `!` for a name in a variable.
    prefix = ""
    if children[1].type in ("#", "!") and len(children) > 3:
        prefix = children.pop(1).type
    subject, rest = children[1], children[2:-1]
    name, index = _name_and_index(subject)
    if not re.fullmatch(r"\w+|[@*#?$!-]", name) or (prefix and rest):
        yield WordPiece(not_read, is_quoted)
        return
    if prefix == "!":
        pointer = _scalar(shell, name, node)
        if index or not pointer.is_known or not re.fullmatch(r"[A-Za-z_]\w*", pointer.text or ""):
            yield WordPiece(not_read if pointer.is_known else pointer, is_quoted)
            return
        name = pointer.text or ""
    if name in ("@", "*"):
        name, index = "@", name
    # The value or values, then the operator.
    found = lookup(shell, name)
    values = _values(shell, name, index, found, node)
    if prefix == "#":
        yield WordPiece(_length(shell, values, index, not_read), is_quoted)
        return
    if rest:
        operator = rest[0].type
        start = rest[0].end_byte
        body = list(covered(node, start, children[-1].start_byte))
        yield from _operated(
            shell, values, (name, index, operator), body, is_quoted, (found, not_read)
        )
    elif index in ("@", "*"):
        yield from _elements(shell, values, index, is_quoted)
    else:
        word = values[0] if values else Word("", shell.line_at(node))
        yield WordPiece(replace(word, may_split=False), is_quoted)


def _name_and_index(subject: Node) -> tuple[str, str]:
    if subject.type != "subscript":
        return source(subject), ""
    name, _, index = source(subject).partition("[")
    return name, index[:-1]


def _values(
    shell: Shell, name: str, index: str, found: Variable | None, node: Node
) -> tuple[Word, ...]:
    """Return the words that a name and an index stand for."""
    if index in ("@", "*"):
        if found is not None:
            return found.words
        word = unset_value(shell, name)
        hidden = replace(word, where=shell.line_at(node), may_split=True)
        return () if word.is_known else (hidden,)
    if not index or name == "BASH_SOURCE":
        return (_scalar(shell, name, node),)
    if found is None:
        return (unset_value(shell, name),)
    if any(word.is_conditional for word in found.words):
        return (next(word for word in found.words if word.is_conditional),)
    if found.keys is not None:
        key = in_quotes(shell, index)
        if not key.is_known:
            return (key,)
        pairs = dict(zip(found.keys, found.words, strict=True))
        return (pairs.get(key.text or "", Word("", shell.where)),)
    number = calculated(shell, index)
    if not number.is_known:
        return (number,)
    place = int(number.text or "0")
    before = found.words[: place + 1] if place >= 0 else found.words
    if any(word.may_split for word in before):
        first = next(word for word in before if word.may_split)
        return (replace(first, text=None, parts=(), may_split=False),)
    inside = -len(found.words) <= place < len(found.words)
    return (found.words[place] if inside else Word("", shell.where),)


def _length(shell: Shell, values: Sequence[Word], index: str, not_read: Word) -> Word:
    if index in ("@", "*"):
        hidden = [word for word in values if word.is_conditional or word.may_split or word.subject]
        return (
            replace(hidden[0], may_split=False) if hidden else Word(str(len(values)), shell.where)
        )
    word = values[0] if values else Word("", shell.where)
    return Word(str(len(word.text or "")), shell.where) if word.is_known else word


def _operated(
    shell: Shell,
    values: tuple[Word, ...],
    what: tuple[str, str, str],
    body: list[Node | str],
    is_quoted: bool,
    otherwise: tuple[Variable | None, Word],
) -> Iterator[WordPiece]:
    """Yield `${X<operator>body}`.

    Args:
        what: name, index, operator.
        otherwise: the variable, None where it is not set, and the word for what is not read.
    """
    (name, index, operator), (found, not_read) = what, otherwise
    if operator.lstrip(":") in ("-", "=", "+", "?") and operator != ":":
        yield from _defaulted(shell, values, what, body, is_quoted, found)
        return
    if found is None and any(not word.is_known for word in values):
        yield WordPiece(values[0], is_quoted)
        return
    if operator == ":":
        yield from _sliced(shell, values, (name, index), body, is_quoted, not_read)
        return
    done = [_changed(shell, word, operator, body, not_read) for word in values]
    yield from _elements(shell, done, index or "@", is_quoted)


def _defaulted(
    shell: Shell,
    values: tuple[Word, ...],
    what: tuple[str, str, str],
    body: list[Node | str],
    is_quoted: bool,
    found: Variable | None,
) -> Iterator[WordPiece]:
    name, index, operator = what
    if not index and (name in ("PWD", "HOME") or (found is None and shell.is_of_bash(name))):
        yield WordPiece(unset_value(shell, name) if found is None else values[0], is_quoted)
        return
    is_empty = found is None or not values or all(word.text == "" for word in values)
    is_missing = found is None or (not values and index != "") or (":" in operator and is_empty)
    hidden = next((word for word in values if word.text is None), None)
    if ":" in operator and hidden is not None and found is not None and not is_missing:
        known = any(part.text for word in values for part in word.parts)
        if not known:  # it may be empty, and then be replaced
            yield WordPiece(hidden, is_quoted)
            return
    kind = operator[-1]
    if kind == "+":
        if not is_missing:
            yield from _body(shell, body, is_quoted)
        return
    if not is_missing:
        yield from _elements(shell, values, index or "@", is_quoted)
        return
    if kind == "?":
        word = unset_value(shell, name)
        yield WordPiece(
            unknown(shell.where, f"${name}", "is needed") if word.is_known else word, True
        )
        return
    default = list(_body(shell, body, is_quoted))
    if kind == "=" and not index and not name.isdecimal():
        shell.assign(name, [joined(default, shell.where)])
    yield from default


def _body(shell: Shell, body: list[Node | str], is_quoted: bool) -> Iterator[WordPiece]:
    """Yield the word behind an operator, in which blanks stand for themselves."""
    for part in body:
        if is_quoted and not isinstance(part, str) and part.type == "raw_string":
            yield from pieces(shell, source(part), True)
            continue
        for piece in pieces(shell, part, is_quoted):
            # Unquoted text of a default is split like the value of a variable.
            yield replace(piece, is_text=False) if not piece.is_quoted else piece


def _sliced(
    shell: Shell,
    values: tuple[Word, ...],
    what: tuple[str, str],
    body: list[Node | str],
    is_quoted: bool,
    not_read: Word,
) -> Iterator[WordPiece]:
    name, index = what
    text = "".join(part if isinstance(part, str) else source(part) for part in body)
    bounds = [calculated(shell, part) for part in text.split(":")]
    hidden = next((word for word in (*bounds, *values) if not word.is_known), None)
    if hidden is not None or len(bounds) > 2 or "?" in text:
        yield WordPiece(hidden or not_read, is_quoted)
        return
    if name == "@":  # arguments count from $1; ${@:0} has $0
        values = (not_read, *values)
    start, *more = (int(word.text or "0") for word in bounds)
    length = len(values) if index else len(values[0].text or "") if values else 0
    start = start + length if start < 0 else start
    stop = length if not more else start + more[0] if more[0] >= 0 else length + more[0]
    if start < 0 or start > length or (index and more and more[0] < 0):
        yield from _elements(shell, (), "@", is_quoted)
        return
    if index:
        yield from _elements(shell, values[start:stop], index, is_quoted)
    else:
        part = (values[0].text or "")[start : max(stop, start)] if values else ""
        yield WordPiece(Word(part, shell.where), is_quoted)


def _changed(
    shell: Shell, word: Word, operator: str, body: list[Node | str], not_read: Word
) -> Word:
    """Return a value whose case, front, end or parts an operator changes."""
    if not word.is_known:
        return word
    text = word.text or ""
    if operator in _CASES and not body:
        return Word(_CASES[operator](text), word.where)
    if len(text) > _LONGEST:
        return not_read
    if operator in ("#", "##", "%", "%%"):
        expression = pattern(shell, [p for part in body for p in pieces(shell, part)])
        if isinstance(expression, Word):
            return expression if not expression.is_known else not_read
        found = trimmed(text, expression, operator)
        return not_read if found is None else Word(found, word.where)
    if operator not in ("/", "//"):
        return not_read
    cut = next((i for i, p in enumerate(body) if not isinstance(p, str) and p.type == "/"), None)
    before, after = (body, []) if cut is None else (body[:cut], body[cut + 1 :])
    expression = pattern(shell, [p for part in before for p in pieces(shell, part)])
    new = joined([p for part in after for p in pieces(shell, part)], shell.where)
    if isinstance(expression, Word) or not new.is_known:
        return not_read
    if not expression or "&" in (new.text or "") or "/" in operator[2:]:
        return not_read
    return _replaced(word, expression, new.text or "", operator == "//") or not_read


def _replaced(word: Word, expression: str, new: str, is_everywhere: bool) -> Word | None:
    """Replace the first, or every, longest part that a pattern matches."""
    text, done, position = word.text or "", "", 0
    while position < len(text):
        ends = range(len(text), position, -1)
        for end in ends:
            found = matches(expression, text[position:end])
            if found is None:
                return None
            if found:
                done, position = done + new, end
                if not is_everywhere:
                    return Word(done + text[position:], word.where)
                break
        else:
            done, position = done + text[position], position + 1
    return Word(done, word.where)


def _arithmetic(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    text = bare_source(node)
    inner = text[3:-2] if text.startswith("$((") else text[2:-1]
    yield WordPiece(replace(calculated(shell, inner), where=shell.line_at(node)), is_quoted)


EXPANDERS["simple_expansion"] = _simple
EXPANDERS["expansion"] = _expansion
EXPANDERS["arithmetic_expansion"] = _arithmetic
