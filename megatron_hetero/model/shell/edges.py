"""Words beside an expansion that may be no word at all: `a$(echo $U x)` is `ax` where U is empty.

Where text touches an expansion, its first or last known word is only known if nothing uncertain
stands between.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.tree import source
from megatron_hetero.model.shell.values import Word, atoms, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node

_AROUND = {"string": 1, "concatenation": 0}
"""Kinds of words with several parts, each with the number of its quotes at either end."""


def touched_sides(node: Node) -> tuple[bool, bool]:
    """Return whether text stands before and behind an expansion, without a blank between."""
    starts_blank = source(node)[:1].isspace()
    return not starts_blank and _is_touched(node, True), _is_touched(node, False)


def _is_touched(node: Node, before: bool) -> bool:
    parent = node.parent
    while parent is not None and parent.type in _AROUND:
        text, quotes = parent.text or b"", _AROUND[parent.type]
        start, end = node.start_byte - parent.start_byte, node.end_byte - parent.start_byte
        gap = text[quotes:start] if before else text[end : len(text) - quotes]
        if gap:
            is_continued = gap.endswith(b"\\\n") if before else gap.startswith(b"\\\n")
            return is_continued or not (gap[-1:] if before else gap[:1]).isspace()
        node, parent = parent, parent.parent
    beside = node.prev_sibling if before else node.next_sibling
    if beside is None or (beside.end_byte if before else beside.start_byte) != (
        node.start_byte if before else node.end_byte
    ):
        return False
    return beside.is_named or beside.type == "+="


def doubted(words: list[Word], before: bool, behind: bool) -> list[Word]:
    """Take the first known word for unknown where text is before all words and only what may be no
    word comes first; the last one in the same way.

    The text is kept, as what the word may be.
    """
    done = list(words)
    for is_needed, step in ((before, 1), (behind, -1)):
        if is_needed:
            _doubt(done, step)
    return done


def _doubt(words: list[Word], step: int) -> None:
    why: Word | None = None
    for i in range(len(words))[::step]:
        parts = list(words[i].parts or (words[i],))
        for j in range(len(parts))[::step]:
            part = parts[j]
            if not part.is_known:
                if not (part.may_split or words[i].may_split):
                    return
                why = why or part
                continue
            if not (part.text or "").strip():
                continue
            if why is not None:
                found = list(atoms(part))
                at = next(k for k in range(len(found))[::step] if (found[k].text or "").strip())
                found[at] = replace(
                    found[at], reason=why.reason, subject=why.subject, is_conditional=True
                )
                parts[j : j + 1] = found
                joined = concatenate(parts)
                words[i] = replace(joined, where=words[i].where, may_split=words[i].may_split)
            return
