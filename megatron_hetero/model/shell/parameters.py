"""Values of `$X` and `${X...}`: defaults, lengths, parts, replacements, elements of arrays."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.defaults import defaulted
from megatron_hetero.model.shell.expansion import WordPiece, joined, key_of, pattern, pieces
from megatron_hetero.model.shell.held import Variable
from megatron_hetero.model.shell.lookup import calculated, elements, lookup, scalar, unset_value
from megatron_hetero.model.shell.patterns import replaced, trimmed
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import bare_source, covered, source
from megatron_hetero.model.shell.values import Word, opaque, unknown

if TYPE_CHECKING:
    from tree_sitter import Node

_LONGEST = 4096
"""Characters of a text in which patterns are looked for."""
_CASES = {"^^": str.upper, ",,": str.lower}


def simple_expansion(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    """Read `$X`."""
    name = bare_source(node)[1:]
    if name in ("@", "*"):
        yield from elements(shell, shell.arguments, name, is_quoted)
        return
    # One variable is one word in quotes, and is split by `assembled` where it stands without.
    yield WordPiece(scalar(shell, name, shell.line_at(node))._replace(may_split=False), is_quoted)


def expansion(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    """Read `${...}`."""
    children = list(node.children)
    # A form with `@` may be any number of words, also in quotes.
    not_read = unknown(shell.line_at(node), bare_source(node), "is not run")
    not_read = not_read._replace(may_split="@" in bare_source(node))
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
        pointer = scalar(shell, name, shell.line_at(node))
        # A pointer leads to a variable, an element (`A[1]`) or all of them (`A[@]`).
        match = re.fullmatch(r"([A-Za-z_]\w*|\d+)(?:\[(@|\*|\d+)\])?", pointer.text or "")
        if not index and pointer.is_known and match is None:
            fault = "leads to no variable, and bash leaves its statement"
            shell.note("", f"{bare_source(node)} {fault}")
        if index or not pointer.is_known or match is None:
            # `${!A[@]}` and a pointer to many give any number of words, also in quotes.
            word = not_read if pointer.is_known else opaque(pointer)
            yield WordPiece(word._replace(may_split=True), is_quoted)
            return
        name, index = match[1], match[2] or ""
    # `${@}` and `${A[@]}` go the same way: all elements of something.
    if name in ("@", "*"):
        name, index = "@", name
    # The value or values, then the operator.
    found = lookup(shell, name)
    # The number of elements needs not their order.
    if prefix == "#" and index in ("@", "*") and found is not None and found.keys is not None:
        yield WordPiece(Word(str(len(found.words)), shell.where), is_quoted)
        return
    values = _values(shell, name, index, found, node)
    if prefix == "#":
        yield WordPiece(_length(shell, values, index), is_quoted)
        return
    if rest:
        operator = rest[0].type
        start = rest[0].end_byte
        # The body is taken by bytes: the grammar drops blanks that count.
        body = list(covered(node, start, children[-1].start_byte))
        yield from _operated(
            shell, values, (name, index, operator), body, is_quoted, (found, not_read)
        )
    elif index in ("@", "*"):
        yield from elements(shell, values, index, is_quoted)
    else:
        word = values[0] if values else Word("", shell.line_at(node))
        yield WordPiece(word._replace(may_split=False), is_quoted)


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
        # All elements: those of an array, or one word for an array that the script does not set.
        if found is not None and len(found.keys or ()) > 1:
            # Bash orders the elements of a table by a sum of each key.
            why = unknown(shell.line_at(node), f"${{{name}[{index}]}}", "has an order of its own")
            return tuple(why for _ in found.words)
        if found is not None:
            return found.words
        word = unset_value(shell, name)
        hidden = word._replace(where=shell.line_at(node), may_split=True)
        return () if word.is_known else (hidden,)
    if not index or name == "BASH_SOURCE":
        # `BASH_SOURCE` with any number is the file itself, as no stack of calls is kept.
        return (scalar(shell, name, shell.line_at(node)),)
    if found is None:
        return (unset_value(shell, name),)
    # An element that may be missing shifts the numbers of all behind it.
    if any(word.is_conditional for word in found.words):
        return (opaque(next(word for word in found.words if word.is_conditional)),)
    if found.keys is not None:
        # In a table the index is text, not arithmetic.
        key = key_of(shell, index)
        if not key.is_known:
            return (opaque(key),)
        pairs = dict(zip(found.keys, found.words, strict=True))
        return (pairs.get(key.text or "", Word("", shell.where)),)
    number = calculated(shell, index)
    if not number.is_known:
        return (number,)
    place = int(number.text or "0")
    # A negative index counts from the end, so every element matters for it.
    before = found.words[: place + 1] if place >= 0 else found.words
    if any(word.may_split for word in before):
        # An element that may be several words, or none, leaves open which element a number means.
        first = next(word for word in before if word.may_split)
        return (opaque(first),)
    inside = -len(found.words) <= place < len(found.words)
    return (found.words[place] if inside else Word("", shell.where),)


def _length(shell: Shell, values: Sequence[Word], index: str) -> Word:
    if index in ("@", "*"):
        # An element that may be none or several leaves the number of elements open.
        hidden = [word for word in values if word.is_conditional or word.may_split or word.subject]
        return opaque(hidden[0]) if hidden else Word(str(len(values)), shell.where)
    word = values[0] if values else Word("", shell.where)
    if not (word.text or "").isascii():
        return _of_locale(shell, word)
    return Word(str(len(word.text or "")), shell.where) if word.is_known else opaque(word)


def _of_locale(shell: Shell, word: Word) -> Word:
    """Return an unknown word: bash counts bytes or characters, and knows cases, by the locale."""
    return unknown(shell.where, f'"{word.text}"', "has characters that depend on the locale")


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
        # These operators have a case of their own for a variable that is not set.
        yield from defaulted(shell, values, what, body, is_quoted, found)
        return
    if found is None and any(not word.is_known for word in values):
        # Other operators change a value, and this value only the environment knows.
        yield WordPiece(values[0], is_quoted)
        return
    if operator == ":":
        yield from _sliced(shell, values, (name, index), body, is_quoted, not_read)
        return
    # Operators on patterns apply to each element of an array alone.
    done = [_changed(shell, word, operator, body, not_read) for word in values]
    yield from elements(shell, done, index or "@", is_quoted)


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
    # Bounds are arithmetic with a `:` between; a `?` may have a `:` of its own.
    bounds = [calculated(shell, part) for part in text.split(":")]
    hidden = next((word for word in (*bounds, *values) if not word.is_known), None)
    if hidden is not None or len(bounds) > 2 or "?" in text:
        # A part of an array may be any number of its elements.
        of_many = index == "@"
        word = not_read if hidden is None else opaque(hidden, may_split=of_many)
        yield WordPiece(word, is_quoted)
        return
    if name == "@":  # arguments count from $1; ${@:0} has $0
        values = (not_read, *values)
    start, *more = (int(word.text or "0") for word in bounds)
    # Lengths are in elements for an array, in characters for a text.
    if not index and values and not (values[0].text or "").isascii():
        yield WordPiece(_of_locale(shell, values[0]), is_quoted)
        return
    length = len(values) if index else len(values[0].text or "") if values else 0
    start = start + length if start < 0 else start
    # A negative length counts from the end, which bash allows for texts alone.
    stop = length if not more else start + more[0] if more[0] >= 0 else length + more[0]
    if start < 0 or start > length or (index and more and more[0] < 0):
        yield from elements(shell, (), "@", is_quoted)
        return
    if index:
        yield from elements(shell, values[start:stop], index, is_quoted)
    else:
        part = (values[0].text or "")[start : max(stop, start)] if values else ""
        yield WordPiece(Word(part, shell.where), is_quoted)


def _changed(
    shell: Shell, word: Word, operator: str, body: list[Node | str], not_read: Word
) -> Word:
    """Return a value whose case, front, end or parts an operator changes."""
    if not word.is_known:
        return opaque(word, may_split=word.may_split)
    text = word.text or ""
    if not text.isascii():
        return _of_locale(shell, word)
    # Without a pattern `^^` and `,,` change every character.
    if operator in _CASES and not body:
        return Word(_CASES[operator](text), word.where)
    # Every part of the text is tried against a pattern, which takes long for a long text.
    if len(text) > _LONGEST:
        return not_read
    if operator in ("#", "##", "%", "%%"):
        expression = pattern(shell, [p for part in body for p in pieces(shell, part)])
        if isinstance(expression, Word):
            return not_read if expression.is_known else opaque(expression)
        found = trimmed(text, expression, operator)
        return not_read if found is None else Word(found, word.where)
    if operator not in ("/", "//", "/#", "/%"):
        return not_read
    # The pattern stands before the first `/` node of the grammar, the new text behind it.
    cut = next((i for i, p in enumerate(body) if not isinstance(p, str) and p.type == "/"), None)
    before, after = (body, []) if cut is None else (body[:cut], body[cut + 1 :])
    expression = pattern(shell, [p for part in before for p in pieces(shell, part)])
    new = joined([p for part in after for p in pieces(shell, part)], shell.where)
    # `&` in the new text is the match itself in bash 5.2, and plain text before.
    if isinstance(expression, Word) or not new.is_known or "&" in (new.text or ""):
        return not_read
    changed = replaced(text, expression, new.text or "", operator)
    return not_read if changed is None else Word(changed, word.where)


def arithmetic_expansion(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    """Read `$((...))`."""
    text = bare_source(node)
    inner = text[3:-2] if text.startswith("$((") else text[2:-1]
    yield WordPiece(calculated(shell, inner)._replace(where=shell.line_at(node)), is_quoted)
