"""Application of a unified diff of one file, exactly or not at all.

The text is known by its hash, so there is no fuzz and no offset. `patch -p1` and `git apply` read
the same files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_hetero.errors import FileFormatError

_HUNK = re.compile(r"^@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")


@dataclass(frozen=True)
class Hunk:
    """Lines `before` from line `start` (counted from 1), and `after` at `new_start`."""

    start: int
    new_start: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def reversed(self) -> Hunk:
        """Return the hunk that undoes this hunk."""
        return Hunk(self.new_start, self.start, self.after, self.before)


def hunks_of(diff: str, name: str) -> tuple[Hunk, ...]:
    """Parse the hunks of a unified diff of one file.

    Args:
        diff: the text of the diff.
        name: its name, for error messages.
    Raises:
        FileFormatError: the text is not a unified diff.
    """
    found: list[Hunk] = []
    lines = iter(_lines(diff))
    for line in lines:
        # Names of the file stand before the first hunk only.
        if line.startswith(("--- ", "+++ ")) and not found:
            continue
        header = _HUNK.match(line)
        if header is None:
            raise FileFormatError(f"{name}: not a line of a unified diff: {line.rstrip()!r}")
        # A count that the header leaves out is 1.
        start, num_before, new_start, num_after = (int(n) if n else 1 for n in header.groups())
        before, after = _sides(lines, num_before, num_after, f"{name}: the hunk of line {start}")
        found.append(Hunk(start, new_start, before, after))
    if not found:
        raise FileFormatError(f"{name}: a unified diff without a hunk")
    return tuple(found)


def _sides(
    lines: Iterator[str], num_before: int, num_after: int, where: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    before: list[str] = []
    after: list[str] = []
    # The counts tell the end of a hunk, so that a removed line may begin with `--`.
    while len(before) < num_before or len(after) < num_after:
        line = next(lines, "")
        if line[:1] not in (" ", "-", "+"):
            raise FileFormatError(f"{where} ends early")
        # A context line belongs to both sides.
        if line[0] in " -":
            before.append(line[1:])
        if line[0] in " +":
            after.append(line[1:])
    return tuple(before), tuple(after)


def apply_hunks(text: str, hunks: tuple[Hunk, ...], name: str) -> str:
    """Return `text` with every hunk applied; `name` stands in error messages.

    Raises:
        FileFormatError: the diff was made from another text.
    """
    lines = _lines(text)
    # From the last hunk on, so that line numbers of earlier hunks stay true.
    for hunk in reversed(hunks):
        at = slice(hunk.start - 1, hunk.start - 1 + len(hunk.before))
        if tuple(lines[at]) != hunk.before:
            raise FileFormatError(f"{name}: line {hunk.start} is not what the patch expects")
        lines[at] = hunk.after
    return "".join(lines)


def first_difference(text: str, hunk: Hunk) -> tuple[int, str, str | None] | None:
    """Find the first line of a hunk that a text does not have.

    Returns the line's number, the expected line, and the line found (None past the end). Returns
    None if all lines of the hunk stand together somewhere in the text.
    """
    lines = _lines(text)
    size = len(hunk.before)
    # A hunk that has only moved shows no edited line of its own.
    if any(tuple(lines[i : i + size]) == hunk.before for i in range(len(lines) - size + 1)):
        return None
    for number, expected in enumerate(hunk.before, start=hunk.start):
        found = lines[number - 1] if number <= len(lines) else None
        if found != expected:
            return number, expected, found
    return None


def _lines(text: str) -> list[str]:
    """Split a text into lines with their ends, but not at carriage returns."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)
