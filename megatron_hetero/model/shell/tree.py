"""Bash text to the tree of its grammar, by tree-sitter."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hetero.errors import ModelError

if TYPE_CHECKING:
    from tree_sitter import Node, Parser

MAX_BYTES = 1 << 20
"""Size of a script; a longer text is data, and its grammar could take minutes."""
MAX_DEPTH = 64
"""Statements, expansions and calls inside one another."""
# The private area of Unicode: a script that has such a character is refused.
FIRST_HOLE = 0xE000
LAST_HOLE = 0xF8FF
"""Characters for private use: each stands for a word of which the text is not known."""
REDIRECTIONS = ("file_redirect", "herestring_redirect", "heredoc_redirect")
_HOLE = re.compile(f"[{chr(FIRST_HOLE)}-{chr(LAST_HOLE)}]")


_BOUND = re.compile(r"(\$\{\w{1,99}:)\$([A-Za-z_]\w{0,99} ?[-+*] ?\w{1,20}\})")
_CONTINUED = re.compile(rb"\\\n\S")
_BEFORE_WORD = (b"", *(bytes([byte]) for byte in b" \t\n;&|()<>`"))
_BEFORE_FORM = re.compile(r"(?:[^$`<>\\]|\\.)*", re.DOTALL)


@lru_cache(maxsize=1)
def _parser() -> Parser:
    # The grammar takes some 15 ms to load, and only scripts need it.
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))


def parsed(text: str) -> Node:
    """Return the root of a text's tree."""
    # The grammar has no `$` in bounds that are sums; a name means the same there.
    given = _BOUND.sub(r"\1 \2", text).encode("utf-8", "surrogatepass")
    root = _parser().parse(given).root_node
    while (joined := _joined(given, root)) != given:
        given = joined
        root = _parser().parse(given).root_node
    return root


def _joined(text: bytes, root: Node) -> bytes:
    """Return a text in which no end of a continued line (`\\` and a newline) cuts a word.

    The grammar takes such a word for two, and bash for one.  Bash drops that end wherever the end
    stands, so it is put in front of the word, where all that follows keeps its line number.  At the
    start of a line an empty line stands for it.
    """
    if _CONTINUED.search(text) is None:
        return text
    parts: list[tuple[int, int, bytes]] = []
    for node in descendants(root):
        start = node.start_byte
        for before, child in itertools.pairwise(node.children):
            gap = text[before.end_byte : child.start_byte]
            touches = child.start_byte >= before.end_byte and not gap.replace(b"\\\n", b"")
            if not (touches and before.is_named and child.is_named):
                start = child.start_byte
            elif gap and text[start - 1 : start] in _BEFORE_WORD:
                is_first = re.search(rb"(\A|[^\\]\n)\Z", text[max(start - 2, 0) : start])
                moved = gap.replace(b"\\", b"") if is_first else gap
                parts += [(start, start, moved), (before.end_byte, child.start_byte, b"")]
    done, position = [], 0
    for start, end, instead in sorted(parts):
        done += [text[position:start], instead]
        position = end
    return b"".join([*done, text[position:]])


def parsed_script(path: Path, text: str) -> Node:
    """Return the root of a script's tree.

    Raises:
        ModelError: the text is too large, or has a character that no script has.
    """
    if len(text) > MAX_BYTES:
        raise ModelError(
            f"{path}:1: {len(text)} characters, where a script has at most {MAX_BYTES}; is it one?"
        )
    # A NUL byte means a binary file; a private character would be taken for a hole.
    strange = re.search(f"\\0|{_HOLE.pattern}", text)
    if strange is not None:
        line = text.count("\n", 0, strange.start()) + 1
        raise ModelError(
            f"{path}:{line}: the character U+{ord(strange.group()):04X} is in no script; is it one?"
        )
    # Scripts from Windows have ends of lines that bash would take for text.
    return parsed(text.replace("\r\n", "\n"))


def source(node: Node) -> str:
    """Return the text of a node."""
    return (node.text or b"").decode("utf-8", "surrogatepass")


def bare_source(node: Node) -> str:
    """Return the text of a `$` form, from its first character on."""
    return source(node)[len(_BEFORE_FORM.match(source(node)).group()) :]  # type: ignore[union-attr]


def covered(node: Node, start: int, end: int) -> Iterator[Node | str]:
    """Yield the children of a node between two bytes, and the text between them as strings.

    The grammar drops blanks inside of quotes and braces, where they count.
    """
    text = node.text or b""
    position = start
    for child in node.children:
        # A child outside of the bytes, as the name before an operator, is not the text asked for.
        if child.start_byte < position or child.end_byte > end or not child.end_byte:
            continue
        # The grammar adds nodes without text where something is missing.
        if child.start_byte == child.end_byte:
            continue
        if child.start_byte > position:
            yield _between(text, node.start_byte, position, child.start_byte)
        yield child
        position = child.end_byte
    if position < end:
        yield _between(text, node.start_byte, position, end)


def _between(text: bytes, origin: int, start: int, end: int) -> str:
    return text[start - origin : end - origin].decode("utf-8", "surrogatepass")


def descendants(node: Node) -> Iterator[Node]:
    """Yield a node and all below it, parents first."""
    # An own stack: the tree of a long text may be deeper than Python's calls may be.
    waiting = [node]
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(reversed(found.children))


def first_fault(node: Node) -> Node:
    """Return the first node that the grammar does not understand, else `node`."""
    for found in descendants(node):
        if found.is_error or found.is_missing:
            return found
    return node
