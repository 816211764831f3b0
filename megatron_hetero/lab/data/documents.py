"""Documents of text files in order, and the unreadable lines.

A `.jsonl` (or `.json`) file has one object in each line, with its text under one key. Any other
file is plain text, cut at empty lines, at every line, or not at all. Either may be gzipped.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

Cut = Literal["paragraph", "line", "file"]


@dataclass(frozen=True)
class TextDocument:
    """A text, or the reason why it cannot be read; `where` is its file and first line.

    `position` counts the bytes of the file on disk that have been read.
    """

    where: str
    text: str
    fault: str
    position: int


def documents(path: Path, key: str, cut: Cut) -> Iterator[TextDocument]:
    """Yield every document of one file, in order.

    Args:
        path: the file; a name that ends in .gz is unpacked.
        key: key of the text in a line of JSON.
        cut: border between the documents of a plain text.
    Raises:
        OSError: the file cannot be read; a broken .gz file also raises `EOFError` or `zlib.error`.
    """
    is_packed = path.suffix == ".gz"
    # The position is the raw file's: bytes of the unpacked stream have no place on the disk.
    with path.open("rb") as raw, gzip.open(raw) if is_packed else nullcontext(raw) as opened:
        file = cast(BinaryIO, opened)
        name = path.name.removesuffix(".gz")
        if name.endswith((".jsonl", ".json")):
            for number, line in enumerate(file, 1):
                if line.strip():
                    where = f"{path}:{number}"
                    yield _decoded(where, line, raw.tell(), key)
        else:
            for number, part in _parts(file, cut):
                if part.strip():
                    yield _decoded(f"{path}:{number}", part, raw.tell(), None)


def _parts(lines: Iterable[bytes], cut: Cut) -> Iterator[tuple[int, bytes]]:
    """Yield the pieces of a plain text, each with the number of its first line."""
    first, piece = 1, list[bytes]()
    for number, line in enumerate(lines, 1):
        # An empty line ends a paragraph and belongs to none; "file" keeps empty lines.
        ends = cut == "line" or (cut == "paragraph" and not line.strip())
        if line.strip() or cut == "file":
            first = first if piece else number
            piece.append(line)
        if ends and piece:
            yield first, b"".join(piece)
            piece = []
    # The last document ends with the file.
    if piece:
        yield first, b"".join(piece)


def _decoded(where: str, line: bytes, position: int, key: str | None) -> TextDocument:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return TextDocument(where, "", f"not UTF-8 at byte {error.start}", position)
    # Plain text has no form to check; a line of JSON must be an object with text under its key.
    if key is None:
        return TextDocument(where, text.rstrip("\r\n"), "", position)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        return TextDocument(where, "", f"not JSON: {error}", position)
    if not isinstance(found, dict):
        return TextDocument(where, "", "not a JSON object", position)
    value = found.get(key)
    if not isinstance(value, str):
        what = f'"{key}" is no text' if key in found else f'no key "{key}"'
        return TextDocument(where, "", what, position)
    if not value:
        return TextDocument(where, "", f'"{key}" is empty', position)
    return TextDocument(where, value, "", position)
