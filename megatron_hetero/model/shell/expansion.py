"""Words of the grammar's tree to pieces, each with its quotes: splitting and patterns ask for
quotes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.patterns import regex_of
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.tree import (
    FIRST_HOLE,
    LAST_HOLE,
    bare_source,
    covered,
    parsed,
    source,
)
from megatron_hetero.model.shell.values import Word, concatenate, unknown

if TYPE_CHECKING:
    from tree_sitter import Node


@dataclass(frozen=True)
class WordPiece:
    """A part of a word: its value, whether it is quoted, and whether it is plain text of the script
    (which is not split).  `end` is the blank at which an element of an array ends here."""

    word: Word
    is_quoted: bool = False
    is_text: bool = False
    end: Word | None = None


HOLES = re.compile(f"([{chr(FIRST_HOLE)}-{chr(LAST_HOLE)}])")
_HOME = re.compile(r"\A~[\w.+-]*(?=/|$)")
_HOMES = re.compile(r"(?<=:)~[\w.+-]*(?=[/:]|$)")
_FORM = re.compile(r"['\"`]|\$[\w{(@*#?!$-]")
"""Quotes, and what a `$` begins."""
_WITHOUT_QUOTES = re.compile(r'\\.|\$\{[^{}"]*\}|\$\([^()"]*\)|\$\(\([^"]*?\)\)|`[^`"]*`')
"""Forms of a here-document that have no quotes inside."""
_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"', "r": "\r", "a": "\a", "e": "\x1b"}

Expander = Callable[[Shell, "Node", bool], Iterator[WordPiece]]
"""Reads a `$` form; the flag says whether it stands in double quotes."""
EXPANDERS: dict[str, Expander] = {}
"""Type of a node -> its expander; filled by the modules that have them."""


def literal(shell: Shell, text: str, is_quoted: bool, where: str = "") -> Iterator[WordPiece]:
    """Yield text of the script, with words in the place of holes."""
    for part in HOLES.split(text):
        if HOLES.fullmatch(part):
            word = shell.records.holes[ord(part) - FIRST_HOLE]
            yield WordPiece(word, is_quoted)
        elif part:
            yield WordPiece(Word(part, where or shell.where), is_quoted, is_text=True)


def pieces(shell: Shell, node: Node | str, is_quoted: bool = False) -> Iterator[WordPiece]:
    """Yield the pieces of a word."""
    shell.deeper(1)
    try:
        yield from _pieces(shell, node, is_quoted)
    finally:
        shell.deeper(-1)


def _pieces(shell: Shell, node: Node | str, is_quoted: bool) -> Iterator[WordPiece]:
    if isinstance(node, str):
        yield from _plain(shell, node, is_quoted, shell.where)
        return
    where = shell.line_at(node)
    if node.type in EXPANDERS:
        # In a string the grammar gives an expansion the blanks before it.
        before = source(node)[: -len(bare_source(node))]
        yield from _plain(shell, before, is_quoted, where)
        yield from EXPANDERS[node.type](shell, node, is_quoted)
    elif node.is_error or node.is_missing:
        yield WordPiece(unknown(where, source(node), "is not understood"), is_quoted)
    elif node.type == "raw_string" and not is_quoted:
        yield WordPiece(Word("", where), True, is_text=True)
        yield from literal(shell, source(node)[1:-1], True, where)
    elif node.type == "ansi_c_string" and not is_quoted:
        yield WordPiece(_ansi(source(node)[2:-1], where), True)
    elif node.type == "string":
        # Quotes inside of quotes stand in the braces of an expansion, where they only vanish.
        yield from _string(shell, node, where)
    elif node.type == "translated_string":
        yield from _string(shell, node.children[-1], where)
    elif node.type in ("regex", "extglob_pattern") and _FORM.search(source(node)):
        yield from _pattern_text(shell, node, where)
    elif node.children and node.type != "word":
        # Several parts, or a form of the grammar that is but text where a word stands.
        for part in covered(node, node.start_byte, node.end_byte):
            yield from pieces(shell, part, is_quoted)
    else:
        yield from _plain(shell, source(node), is_quoted, where)


def _pattern_text(shell: Shell, node: Node, where: str) -> Iterator[WordPiece]:
    """Yield the pieces of a pattern, whose quotes and `$` forms the grammar leaves as text."""
    yield from _value_pieces(shell, source(node), where)


def _value_pieces(shell: Shell, text: str, where: str) -> list[WordPiece]:
    """Return the pieces of text that bash would read as the value of an assignment."""
    root = parsed(f"A={text}")
    given = root.children[0] if root.child_count == 1 else root
    if root.has_error or given.type != "variable_assignment" or given.child_count != 3:
        return [WordPiece(unknown(where, text, "is not understood"))]
    outer, shell.line_of_code = shell.line_of_code, where
    found = list(pieces(shell, given.children[2]))
    shell.line_of_code = outer
    return found


def _string(shell: Shell, node: Node, where: str) -> Iterator[WordPiece]:
    start, end = node.start_byte, node.end_byte
    if not source(node).endswith('"') or end - start < 2 or node.has_error:
        yield WordPiece(unknown(where, source(node), "is not understood"), True)
        return
    inner = list(covered(node, start + 1, end - 1))
    empty = not inner
    for part in inner:
        if isinstance(part, str) or part.type == "string_content":
            text = part if isinstance(part, str) else source(part)
            yield from literal(shell, _in_double_quotes(text), True, where)
            continue
        found = list(pieces(shell, part, True))
        empty = empty or (bool(found) and len(inner) == 1)
        yield from found
    if empty or len(inner) > 1:
        yield WordPiece(Word("", where), True, is_text=True)


def _in_double_quotes(text: str) -> str:
    return re.sub(r'\\([$`"\\\n])', lambda m: "" if m[1] == "\n" else m[1], text)


def _plain(shell: Shell, text: str, is_quoted: bool, where: str) -> Iterator[WordPiece]:
    """Yield unquoted text: what a backslash precedes is quoted."""
    if is_quoted:
        yield from literal(shell, _in_double_quotes(text), True, where)
        return
    for part in re.split(r"(\\.)", text, flags=re.DOTALL):
        if len(part) == 2 and part[0] == "\\":
            if part[1] != "\n":
                yield from literal(shell, part[1], True, where)
        else:
            yield from literal(shell, part, False, where)


def _ansi(text: str, where: str) -> Word:
    """Read `$'...'`."""
    found = re.sub(r"\\(.)", lambda m: _ESCAPES.get(m[1], "\0"), text, flags=re.DOTALL)
    if "\0" in found:
        return unknown(where, f"$'{text}'", "has an escape that is not read")
    return Word(found, where)


def joined(found: Iterable[WordPiece], where: str) -> Word:
    """Join the pieces of an assignment's value, which is not split, to a single word."""
    words: list[Word] = []
    for piece in found:
        words.append(piece.word)
        if piece.end is not None:
            words.append(piece.end)
    return concatenate(words)._replace(where=where, may_split=False)


def value(shell: Shell, node: Node | str, where: str = "") -> Word:
    """Expand a word that is not split: the value of an assignment, a word of `[[ ]]`."""
    found = with_home(shell, list(pieces(shell, node)))
    # In a value as of PATH a home folder may stand behind each colon.
    found = [part for piece in found for part in _homes(shell, piece, _HOMES)]
    return joined(found, where or shell.where)


def pattern(shell: Shell, found: Iterable[WordPiece]) -> str | Word:
    """Return the regular expression of a pattern, or the word that makes the pattern unknown."""
    parts: list[tuple[str, bool]] = []
    for piece in found:
        if not piece.word.is_known:
            return piece.word
        parts.append((piece.word.text or "", piece.is_quoted))
    # A pattern in one variable is one pattern: a bracket may open in one piece, close in another.
    runs = itertools.groupby(parts, key=lambda part: part[1])
    expression = regex_of(("".join(text for text, _ in run), quoted) for quoted, run in runs)
    return unknown(shell.where, "a pattern", "is not read") if expression is None else expression


def with_home(shell: Shell, found: list[WordPiece]) -> list[WordPiece]:
    """Replace a `~` at the start, for the home folder of whoever runs the script."""
    return [*(part for first in found[:1] for part in _homes(shell, first, _HOME)), *found[1:]]


def _homes(shell: Shell, piece: WordPiece, form: re.Pattern[str]) -> Iterator[WordPiece]:
    """Yield a piece, with an unknown word in the place of each home folder in its plain text."""
    text, where, position = piece.word.text or "", piece.word.where, 0
    if not piece.is_text or piece.is_quoted or not form.search(text):
        yield piece
        return
    for match in form.finditer(text):
        yield from literal(shell, text[position : match.start()], False, where)
        why = "is the home folder of whoever runs the script"
        yield WordPiece(unknown(where, match[0], why), True)
        position = match.end()
    yield from literal(shell, text[position:], False, where)


def in_quotes(shell: Shell, text: str) -> Word:
    """Expand text as in double quotes: an arithmetic expression, a here-document."""
    if "$" not in text and "`" not in text and "\\" not in text:
        return concatenate([piece.word for piece in literal(shell, text, True)] or [Word("", "")])
    root = parsed('"' + text.replace('"', "") + '"')
    string = root
    while string.type != "string" and string.child_count == 1:
        string = string.children[0]
    if string.type != "string" or root.has_error:
        return unknown(shell.where, text, "is not understood")
    outer, shell.line_of_code = shell.line_of_code, shell.where
    try:
        return concatenate([piece.word for piece in pieces(shell, string)])
    finally:
        shell.line_of_code = outer


def key_of(shell: Shell, text: str) -> Word:
    """Expand the key of a table's element, as in `${M["a b"]}`: its quotes are no part of it."""
    if '"' not in text and "'" not in text:
        return in_quotes(shell, text)
    return joined(_value_pieces(shell, text, shell.where), shell.where)


def in_here_document(shell: Shell, text: str) -> Word:
    """Expand the text of a here-document, in which double quotes are but characters.

    In the braces of an expansion and in commands they are quotes again: such text is not read.
    """
    if '"' not in text:
        return in_quotes(shell, text)
    if re.search(r"\$[({]|`", _WITHOUT_QUOTES.sub("", text)):
        return unknown(shell.where, "a here-document", "has quotes that are not read")
    quote = shell.hole(Word('"', shell.where))
    return in_quotes(shell, text.replace('"', quote))
