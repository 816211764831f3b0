"""Values that the branches of a script make, merged where the text does not decide for one."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_hetero.model.shell.values import Word, atoms, concatenate, same


def merged(branches: Sequence[tuple[Word, ...]], reason: str, where: str) -> tuple[Word, ...]:
    """Merge the lists of words that branches make.

    The words at both ends that all branches share are known.  Those between keep their text, with
    `reason`, where they hold flags, so that a refusal can name these; else they are one unknown.
    """
    head, tail = _shared(branches)
    return _joined(branches, head, tail, (reason, where))


def merged_value(branches: Sequence[Word | None], reason: str, where: str) -> Word:
    """Merge the values that branches give a variable, word by word; None for one that is not
    set."""
    lists = [() if word is None else atoms(word) for word in branches]
    head, tail = _shared(lists)
    # What touches other text in one branch, and a blank in another, belongs to neither end.
    while head and _is_torn([w[head : len(w) - tail][:1] for w in lists]) and _is_text(
        lists[0][head - 1]
    ):
        head -= 1
    while tail and _is_torn([w[head : len(w) - tail][-1:] for w in lists]) and _is_text(
        lists[0][len(lists[0]) - tail]
    ):
        tail -= 1
    return concatenate(_joined(lists, head, tail, (reason, where), Word(" ", where)))


def _shared(branches: Sequence[tuple[Word, ...]]) -> tuple[int, int]:
    """Return the numbers of words that all branches share at the start and at the end."""
    first, rest = branches[0], branches[1:]
    shortest = min(map(len, branches))
    # Equal words at the start, then at the end, which must not overlap.
    head = 0
    while head < shortest and all(same(first[head], other[head]) for other in rest):
        head += 1
    tail = 0
    while tail < shortest - head and all(
        same(first[-1 - tail], other[-1 - tail]) for other in rest
    ):
        tail += 1
    return head, tail


def _is_text(word: Word) -> bool:
    return word.text is None or bool(word.text.strip())


def _is_torn(ends: Sequence[tuple[Word, ...]]) -> bool:
    """Return whether some branches go on with text and others with a blank or not at all."""
    return len({bool(end) and _is_text(end[0]) for end in ends}) > 1


def _joined(
    branches: Sequence[tuple[Word, ...]],
    head: int,
    tail: int,
    why: tuple[str, str],
    blank: Word | None = None,
) -> tuple[Word, ...]:
    """Join what branches share at both ends with what differs between.

    Args:
        why: the reason, and the file and line.
        blank: stands between what differs; None in lists of words.
    """
    reason, where = why
    first = branches[0]
    middles = [branch[head : len(branch) - tail] for branch in branches]
    if not any(middles):
        return first
    # Between the shared ends stands one unknown, which may be none or several words.
    middle: tuple[Word, ...] = (Word(None, where, reason, is_conditional=True, may_split=True),)
    # Words with flags are kept one by one, so that a refusal can name the flag.
    if any(word.is_flag for words in middles for word in words):
        middle = ()
        for words in filter(None, middles):
            between = () if blank is None or not middle else (_perhaps(blank, reason),)
            middle = (*middle, *between, *(_perhaps(word, reason) for word in words))
    return (*first[:head], *middle, *first[len(first) - tail :])


def _perhaps(word: Word, reason: str) -> Word:
    """Return a word, and all that is known of it, that a branch may make."""
    parts = tuple(_perhaps(part, reason) for part in word.parts)
    return word._replace(reason=reason, is_conditional=True, may_split=True, parts=parts)
