"""Values cut into words, and words joined to values, where a word may be none at all.

`echo a $U` prints `a`, a blank and a word, or `a` alone where U is empty: the blank stands there
only with the word, and is as little known as the word.  Text that is added later may then touch
`a`: after `X=$(echo a $U)` the first word of `${X}b` is `ab` or `a`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from megatron_hetero.model.shell.values import BLANKS, Word, concatenate


@dataclass(frozen=True)
class Token:
    """A part of a value: a piece of a word, or the end of a word with the blanks that end it.

    `is_empty_too`: a word ends here even if it has no text, as at each comma after `IFS=,`.
    """

    word: Word
    is_end: bool = False
    is_empty_too: bool = False


def may_be_none(word: Word) -> bool:
    """Return whether the shell may make no word at all of a word."""
    return word.may_split and not any(p.is_known and p.text for p in word.parts or (word,))


def spaced(words: Sequence[Word], blank: Word) -> list[Word]:
    """Return words with a blank between each two, as `echo` and `"${A[*]}"` print words.

    Between two words that are surely there stands one blank at least; all other blanks may vanish
    with their word.
    """
    # Places of the words that are surely there; the last of them has no blank of its own behind it.
    sure = [i for i, word in enumerate(words) if not may_be_none(word)]
    certain = set(sure[:-1])
    made: list[Word] = []
    for i, word in enumerate(words):
        # A word that may be none is one unknown, without parts that would count as text.
        is_one = may_be_none(word) and not word.is_conditional
        made.append(word._replace(parts=()) if is_one else word)
        if i + 1 < len(words):
            # The blank goes with the word that may vanish.
            beside = words[i] if may_be_none(words[i]) else words[i + 1]
            made.append(blank if i in certain or not blank.is_known else as_unknown(blank, beside))
    return made


def as_unknown(word: Word, unknown: Word) -> Word:
    """Return a word that is there only if an unknown one is."""
    return word._replace(reason=unknown.reason, subject=unknown.subject, is_conditional=True)


def tokens(value: Word, separators: str = BLANKS) -> Iterator[Token]:
    """Cut a value at its blanks, or at other separators.

    Of separators that are no blanks, each ends a word (POSIX, "Field Splitting").
    """
    blanks = "".join(c for c in separators if c in BLANKS)
    marks = "".join(c for c in separators if c not in BLANKS)
    # Blanks in a row are one end; a mark with the blanks around it is one end as well (POSIX).
    ends = _class(blanks, "+") if not marks else f"{_class(blanks, '*')}{_class(marks)}"
    if blanks and marks:
        ends = f"{ends}{_class(blanks, '*')}|{_class(blanks, '+')}"
    for found in value.parts or (value,):
        part = found._replace(where=value.where)
        # An unknown part is one token: where blanks in it stand is not known.
        if part.text is None or not separators:
            yield Token(part)
            continue
        # With the separators as a group, `re.split` gives text and separators by turns.
        for i, text in enumerate(re.split(f"({ends})", part.text)):
            if text:
                is_end = i % 2 == 1
                yield Token(part._replace(text=text), is_end, is_end and text.strip(BLANKS) != "")


def _class(characters: str, times: str = "") -> str:
    return f"[{re.escape(characters)}]{times}" if characters else ""


def settled(given: Iterable[Token]) -> list[Token]:
    """Take known words for unknown that touch one another if a blank between them vanishes.

    The text is kept, as what the word may be.
    """
    done = list(given)
    # Known ends of words divide the tokens into runs; no doubt reaches beyond such an end.
    start = 0
    for stop in range(len(done) + 1):
        if stop == len(done) or (done[stop].is_end and done[stop].word.is_known):
            _settle(done, start, stop)
            start = stop + 1
    return done


def _settle(done: list[Token], start: int, stop: int) -> None:
    """Settle the words between two blanks that are surely there."""
    # Words of the run, as places of their parts.
    words: list[list[int]] = [[]]
    for i in range(start, stop):
        if done[i].is_end:
            words.append([])
        elif done[i].word.text != "" or not done[i].word.is_known:
            words[-1].append(i)
    # An unknown word vanishes together with its blank; more parts may leave text behind.
    touching = [w for w in words if w and (len(w) > 1 or done[w[0]].word.is_known)]
    why = next((token.word for token in done[start:stop] if not token.word.is_known), None)
    # Without an unknown part nothing vanishes, and one word alone touches no other.
    if why is None or len(touching) < 2:
        return
    for found in touching:
        if all(done[i].word.is_known for i in found):
            for i in found:
                word = as_unknown(done[i].word, why)._replace(may_split=True)
                done[i] = replace(done[i], word=word)


def split(value: Word, separators: str = BLANKS) -> tuple[Word, ...]:
    """Split the value of an unquoted expansion as the shell does, at blanks by default.

    What only a shell knows is taken for part of one word.
    """
    words = cut(settled(tokens(value, separators)))
    return tuple(concatenate(word)._replace(where=value.where) for word in words)


def cut(given: Iterable[Token]) -> list[list[Word]]:
    """Return the parts of each word."""
    done: list[list[Word]] = []
    # `current` is None between words, so that blanks in a row make no empty words.
    current: list[Word] | None = None
    for token in given:
        if not token.is_end:
            current = [*(current or ()), token.word]
        elif current is not None or token.is_empty_too:
            # Marks such as the comma of `IFS=,` end a word even if it has no text.
            done.append(current or [Word("", token.word.where)])
            current = None
    return done if current is None else [*done, current]
