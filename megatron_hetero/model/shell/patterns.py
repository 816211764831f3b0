"""Patterns of the shell (`*`, `?`, `[a-z]`) as regular expressions."""

from __future__ import annotations

import re
from collections.abc import Iterable

_STAR = "(?s:.*)"
"""The expression of `*`, which matches newlines too."""
_SET = re.compile(r"\[(?P<negated>[!^]?)(?P<members>\]?[^\]\[\\]*)\]")


def regex_of(parts: Iterable[tuple[str, bool]]) -> str | None:
    """Return the regular expression of a pattern; None where it has a form that is not read.

    Args:
        parts: texts in order, and whether each is quoted, so that nothing in it is special.
    """
    # Pieces between the stars.
    runs = [""]
    for text, is_quoted in parts:
        pieces = [re.escape(text)] if is_quoted else _unquoted(text)
        if pieces is None:
            return None
        runs[-1] += pieces[0]
        runs += pieces[1:]
    first, *others = runs
    if not others:
        return first
    # The first place that a piece between two stars fits is as good as any later one: the matcher
    # need not come back to it, which takes exponential time in the number of stars.
    between = "".join(f"(?>(?s:.*?){run})" for run in others[:-1] if run)
    return f"{first}{between}{_STAR}{others[-1]}"


def _unquoted(text: str) -> list[str] | None:
    """Return the expressions between the stars of a text; None for a form that is not read."""
    found, position = [""], 0
    while position < len(text):
        character = text[position]
        members = _SET.match(text, position)
        if character == "[" and members is not None:
            # Characters that are special in Python's sets and plain in the shell's.
            inner = re.sub(r"([\\\]\[^&~|])", r"\\\1", members["members"])
            # Brackets without members are not read.
            if not members["members"]:
                return None
            found[-1] += f"[{'^' if members['negated'] else ''}{inner}]"
            position = members.end()
            continue
        # Escapes, groups of extended patterns and open brackets are not read.
        if character in "[(\\":
            return None
        if character == "*":
            found.append("")
        else:
            # Any character of the shell may be a newline, so the expression has the flag `s`.
            found[-1] += "(?s:.)" if character == "?" else re.escape(character)
        position += 1
    return found


def matches(pattern: str, text: str) -> bool | None:
    """Return whether a pattern's expression is the whole text; None where it is malformed."""
    try:
        return re.fullmatch(pattern, text) is not None
    except re.error:
        return None


def trimmed(text: str, pattern: str, operator: str) -> str | None:
    """Return a text without the part that `#`, `##`, `%` or `%%` takes away."""
    # `##` and `%%` take the longest part that matches, so lengths are tried from the longest.
    lengths = range(len(text) + 1)
    order = lengths if len(operator) == 1 else reversed(lengths)
    for length in order:
        is_front = operator[0] == "#"
        # `#` cuts at the front, `%` at the end.
        part = text[:length] if is_front else text[len(text) - length :]
        found = matches(pattern, part)
        if found is None:
            return None
        if found:
            return text[length:] if is_front else text[: len(text) - length]
    return text


def replaced(text: str, pattern: str, new: str, operator: str) -> str | None:
    """Return a text with `new` for the first longest match (`/`), every one (`//`), or the longest
    at the front (`/#`) or end (`/%`), where an empty pattern adds; None where it is not known."""
    if operator in ("/#", "/%"):
        rest = trimmed(text, pattern, operator[1] * 2)
        # Nothing was taken: without a match the text stays, and a match of no characters adds.
        is_matched = rest != text or matches(pattern, "")
        if rest is None or not is_matched:
            return rest
        return new + rest if operator == "/#" else rest + new
    # What an empty pattern matches in the middle is not read.
    if not pattern:
        return None
    try:
        expression = re.compile(pattern)
    except re.error:
        return None
    done, position = "", 0
    while position < len(text):
        # The last star takes all that it can, so a match is the longest that begins here.
        match = expression.match(text, position)
        if match is None or match.end() == position:
            done, position = done + text[position], position + 1
            continue
        done, position = done + new, match.end()
        if operator == "/":
            return done + text[position:]
    return done
