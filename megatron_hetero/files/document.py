"""Plain data of a file with line numbers, and the builder that enforces limits on size."""

from __future__ import annotations

import codecs
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_hetero.errors import FileFormatError

MAX_FILE_BYTES = 16 << 20
"""A plan for 10,000 GPUs has a few MiB."""
MAX_YAML_BYTES = 4 << 20
"""A cluster file of 10,000 unlike nodes has a tenth of this; YAML takes seven seconds a MiB."""
# Levels and values that no file of ours comes near; a hostile one must not exhaust the reader.
MAX_DEPTH = 32
MAX_VALUES = 1_000_000

KeyPath = tuple[str | int, ...]


def format_keypath(keypath: Sequence[str | int]) -> str:
    """Write a key path as `nodes[2].link.bandwidth`."""
    text = ""
    for part in keypath:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@dataclass(frozen=True)
class Document:
    """Parsed content of a file, and the line on which each key or list item stands."""

    data: Any
    path: Path
    lines: Mapping[KeyPath, int]

    def existing(self, keypath: Sequence[str | int]) -> KeyPath:
        """Return `keypath` without the parts that the file does not have (a schema's own
        labels)."""
        known: KeyPath = ()
        # A part that is missing is left out, and deeper ones are looked for behind it.
        for part in keypath:
            if (*known, part) in self.lines:
                known = (*known, part)
        return known

    def line(self, keypath: Sequence[str | int]) -> int:
        """Return the line of a key path, or of the innermost container in the file on the path."""
        return self.lines[self.existing(keypath)]

    def locate(self, keypath: Sequence[str | int]) -> str:
        """Return `file:line` of a key path; a missing key is located at the mapping that lacks
        it."""
        return f"{self.path}:{self.line(keypath)}"


class DocumentBuilder:
    """Builder of plain data from a stream of keys, values and ends; it refuses what is beyond the
    limits.

    `_keypath` is the place of the value that comes next or is open now: one part for each open
    container that has its key or index.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._root: Any = None
        self._lines: dict[KeyPath, int] = {(): 1}
        self._num_values = 0
        self._open: list[dict[str, Any] | list[Any]] = []
        self._keypath: list[str | int] = []

    def fail(self, line: int, message: str) -> NoReturn:
        """Raise `FileFormatError` with the file, the line and the key that is being read."""
        key = format_keypath(self._keypath)
        raise FileFormatError(f"{self._path}:{line}: {key + ': ' if key else ''}{message}")

    @property
    def expects_key(self) -> bool:
        """Return whether a key of a mapping has to come next."""
        inside_mapping = bool(self._open) and isinstance(self._open[-1], dict)
        # A mapping waits for a key while the path has fewer parts than there are open containers.
        return inside_mapping and len(self._keypath) < len(self._open)

    def key(self, key: object, line: int) -> None:
        """Take the key of the next value."""
        if not isinstance(key, str):
            self.fail(line, f"the key {key!r} is not text; put it in quotes")
        # Both lines, because either key may be the wrong one.
        if key in self._open[-1]:
            first = self._lines[*self._keypath, key]
            self.fail(line, f'duplicate key "{key}", first on line {first}; keep one of them')
        self._keypath.append(key)
        self._lines[tuple(self._keypath)] = line

    def scalar(self, value: Any, line: int) -> None:
        """Take a value that is no container."""
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(line, "NaN and infinite numbers are not allowed; write a finite number")
        self._place(value, line)
        self._leave()

    def begin(self, container: dict[str, Any] | list[Any], line: int) -> None:
        """Open an empty mapping or list whose content comes next, up to `end`."""
        self._place(container, line)
        # The parser recurses with the depth, so the limit comes before the content.
        if len(self._open) == MAX_DEPTH:
            self.fail(line, f"nested deeper than {MAX_DEPTH} levels, the limit of a file")
        self._open.append(container)

    def end(self) -> None:
        """Close the container begun last."""
        self._open.pop()
        self._leave()

    def document(self) -> Document:
        """Return everything that was built."""
        if self._num_values == 0:
            self.fail(1, "the file is empty")
        return Document(self._root, self._path, self._lines)

    def _place(self, value: Any, line: int) -> None:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            self.fail(line, f"more than {MAX_VALUES} values, the limit of a file")
        # A value outside of all containers is the document itself.
        if not self._open:
            if self._num_values > 1:
                self.fail(line, "a second document begins here; keep one")
            self._root = value
            return
        container = self._open[-1]
        if isinstance(container, dict):
            container[str(self._keypath[-1])] = value
        else:
            # Items are their own keys: the index becomes part of the path.
            self._keypath.append(len(container))
            self._lines[tuple(self._keypath)] = line
            container.append(value)

    def _leave(self) -> None:
        if self._open:
            self._keypath.pop()


def read_text(path: Path, most_bytes: int = MAX_FILE_BYTES) -> str:
    """Read a UTF-8 file of at most so many bytes (a byte order mark is dropped).

    Raises:
        FileFormatError: unreadable, too large, or not UTF-8.
    """
    try:
        with path.open("rb") as file:
            # One byte more than allowed tells a larger file, without reading all of it.
            content = file.read(most_bytes + 1)
    except OSError as error:
        raise FileFormatError(f"{path}: cannot be read: {error.strerror}") from None
    if len(content) > most_bytes:
        raise FileFormatError(
            f"{path}:1: larger than {most_bytes} bytes, the limit of such a file; is it the right "
            "one?"
        )
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise FileFormatError(
            f"{path}:1: this is UTF-16 text, as Windows PowerShell writes with >; save the file as "
            "UTF-8"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # Lines are counted in the bytes before the wrong one.
        line = content.count(b"\n", 0, error.start) + 1
        raise FileFormatError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8 text; "
            "save the file as UTF-8"
        ) from None
