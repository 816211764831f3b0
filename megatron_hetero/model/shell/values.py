"""Expanded words, of which some parts only a running shell would know."""

from __future__ import annotations

import itertools
import os.path
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

BLANKS = " \t\n"
"""Characters at which bash splits by default."""


class Word(NamedTuple):
    """Word of a command line, with its file and line.

    A `reason` says why the shell would have to be run to know the word; `text` is then what it may
    be, or None.  `is_conditional`: the script sets it, but only under a condition.  `parts` are
    those of a word that is known in part.  `subject` is the source text that the reason begins
    with, until an assignment has given it the name of a variable.  `may_split`: the shell may make
    none or several words of it.
    """

    text: str | None
    where: str
    reason: str = ""
    is_conditional: bool = False
    parts: tuple[Word, ...] = ()
    subject: str = ""
    may_split: bool = False

    @property
    def is_flag(self) -> bool:
        """Return whether the word begins a flag (`--x`, but not a bare `--` nor a negative
        number)."""
        return self.text is not None and re.match(r"--[A-Za-z]", self.text) is not None

    @property
    def is_known(self) -> bool:
        """Return whether the text is certain, without running the shell."""
        return self.text is not None and not self.reason


Words = tuple[Word, ...]
"""The words of a command, behind its name."""
Status = bool | None
"""True if a command succeeds, False if it fails, None if only a running shell knows."""


def unknown(where: str, subject: str, fault: str) -> Word:
    """Return a word that only a running shell knows: `subject` is source text, `fault` says what is
    the matter with it."""
    return Word(None, where, f"{subject} {fault}", subject=subject)


def opaque(word: Word, *, may_split: bool = False) -> Word:
    """Return a word of which nothing is known, for the reason of `word`, which is not known.

    What depends on a word known in part (its length, a part of it, an element that it numbers) has
    not the text of those parts.
    """
    return word._replace(text=None, parts=(), may_split=may_split)


def concatenate(words: Sequence[Word]) -> Word:
    """Join words to one; what is known of it stays in `parts`."""
    parts = tuple(_with_known_joined(part for word in words for part in (word.parts or (word,))))
    # One part alone keeps its place and its reason.
    if len(parts) == 1:
        return parts[0]
    # The first unknown part gives the reason of the whole word.
    hidden = next((part for part in parts if not part.is_known), None)
    if hidden is None:
        text = "".join(part.text or "" for part in parts)
        return Word(text, parts[0].where if parts else "")
    return hidden._replace(text=None, parts=parts if parts[1:] else ())


def _with_known_joined(parts: Iterable[Word]) -> Iterator[Word]:
    """Join known parts that stand beside one another."""
    for is_known, run in itertools.groupby(parts, key=lambda part: part.is_known):
        first, *rest = run
        if is_known and rest:
            yield first._replace(text="".join(part.text or "" for part in (first, *rest)))
        else:
            yield from (first, *rest)


def assigned(word: Word, name: str, line: int) -> Word:
    """Return the value set by `name=word`, with a reason that names the variable and the line.

    A variable with several words is not named: one of them is the reason, not the whole.
    """
    if word.is_known:
        return word
    if word.parts:
        # A variable that holds several words is no single value that a reason could name.
        holds_words = any(part.text is not None and " " in part.text for part in word.parts)
        name = "" if holds_words else name
        parts = tuple(assigned(part, name, line) for part in word.parts)
        return concatenate(parts)._replace(where=word.where)
    # A reason that begins with "it is" gets the variable as its subject.
    if word.is_conditional:
        reason = re.sub(r"^it is", f"{name} (line {line}) is", word.reason)
        return word._replace(reason=reason)
    # Without a subject the reason names a variable already, the one assigned first.
    if not word.subject:
        return word
    fault = word.reason.removeprefix(word.subject).strip()
    reason = f"{word.subject} (line {line}) {fault}"
    # The reason leads back to the source: "A (line 3) depends on $B, which is not set".
    if name:
        reason = f"{name} (line {line}) depends on {word.subject}, which {fault}"
    return word._replace(reason=reason, subject="")


def shown_path(word: Word) -> str | None:
    """Return the path in a word, for a script started where it lies; None if unknown."""
    # Parts such as `$0` have a text although they are not known: the path from here.
    texts = [part.text for part in word.parts or (word,)]
    return None if None in texts else "".join(text or "" for text in texts)


def file_name(word: Word) -> str:
    """Return the last part of a path, "" where it is not known."""
    # The last part has the name itself, if the folder before it is not known.
    text = (word.parts or (word,))[-1].text
    return os.path.basename(text) if text and (not word.parts or "/" in text) else ""


def same(one: Word, other: Word) -> bool:
    """Return whether two words have the same value, wherever each was written."""
    if len(one.parts) != len(other.parts) or (one.text, one.reason) != (other.text, other.reason):
        return False
    return all(map(same, one.parts, other.parts))


def atoms(word: Word) -> tuple[Word, ...]:
    """Cut a value into words, unknown parts and the blanks between."""
    return tuple(
        part._replace(text=text)
        for part in word.parts or (word,)
        for text in ([None] if part.text is None else re.split(r"(\s+)", part.text))
        if text != ""
    )
