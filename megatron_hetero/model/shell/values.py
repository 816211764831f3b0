"""Expanded words, of which some parts only a running shell would know."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Word:
    """One word of a command line, and where it was written.

    A `reason` says why the shell would have to be run to know the word; `text` is then what it may
    be, or None.  `is_conditional`: the script sets it, but only under a condition.  `parts` are
    those of a word that is known in part.  `subject` is the source text that the reason begins
    with, until an assignment has given it the name of a variable.
    """

    text: str | None
    where: str
    reason: str = ""
    is_conditional: bool = False
    parts: tuple[Word, ...] = ()
    subject: str = ""

    @property
    def is_flag(self) -> bool:
        """Return whether it begins a flag (`--x`, but not a bare `--` nor a negative number)."""
        return self.text is not None and re.match(r"--[A-Za-z]", self.text) is not None

    @property
    def is_known(self) -> bool:
        """Return whether its text is what the shell would make of it."""
        return self.text is not None and not self.reason


def unknown(where: str, subject: str, fault: str) -> Word:
    """Return a word that only a running shell knows: `subject` is source text, `fault` says what is
    the matter with it."""
    return Word(None, where, f"{subject} {fault}", subject=subject)


def concatenate(words: Sequence[Word]) -> Word:
    """Join words to one; what is known of it stays in `parts`."""
    parts = tuple(part for word in words for part in (word.parts or (word,)))
    hidden = next((part for part in parts if not part.is_known), None)
    if hidden is None:
        text = "".join(part.text or "" for part in parts)
        return Word(text, parts[0].where if parts else "")
    return replace(hidden, text=None, parts=parts if parts[1:] else ())


def assigned(word: Word, name: str, line: int) -> Word:
    """Return the value that `name=word` gives, whose reason names the variable and its line.

    A variable with several words is not named: one of them is the reason, not the whole.
    """
    if word.is_known:
        return word
    if word.parts:
        holds_words = any(part.text is not None and " " in part.text for part in word.parts)
        name = "" if holds_words else name
        parts = tuple(assigned(part, name, line) for part in word.parts)
        return replace(concatenate(parts), where=word.where)
    if word.is_conditional:
        reason = re.sub(r"^it is", f"{name} (line {line}) is", word.reason)
        return replace(word, reason=reason)
    if not word.subject:
        return word
    fault = word.reason.removeprefix(word.subject).strip()
    reason = f"{word.subject} (line {line}) {fault}"
    if name:
        reason = f"{name} (line {line}) depends on {word.subject}, which {fault}"
    return replace(word, reason=reason, subject="")


def split(word: Word) -> tuple[Word, ...]:
    """Split the value of an unquoted expansion at blanks, as the shell does.

    What only a shell knows is taken for part of one word.
    """
    if word.text is not None:
        return tuple(replace(word, text=text) for text in word.text.split())
    fields: list[list[Word]] = [[]]
    for part in word.parts or (word,):
        if part.text is None or part.reason:
            fields[-1].append(part)
            continue
        for i, text in enumerate(re.split(r"\s+", part.text)):
            if i:
                fields.append([])
            if text:
                fields[-1].append(replace(part, text=text))
    return tuple(replace(concatenate(field), where=word.where) for field in fields if field)
