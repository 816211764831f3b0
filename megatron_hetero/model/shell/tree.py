"""Bash text to the tree of its grammar, by tree-sitter."""

from __future__ import annotations

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
    text = _BOUND.sub(r"\1 \2", text)
    return _parser().parse(text.encode("utf-8", "surrogatepass")).root_node


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


def text_between(parent: Node, before: Node, behind: Node) -> str:
    """Return the text between two children of a node."""
    return _between(parent.text or b"", parent.start_byte, before.end_byte, behind.start_byte)


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
