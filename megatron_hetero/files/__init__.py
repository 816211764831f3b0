"""The only reader and writer of YAML and JSON: strict, bounded, and always knowing the line.

A file is a stranger's: it is read as plain data (null, bool, int, float, str, list, dict) and never
constructs an object.  Refused with `file:line`: more than 16 MiB (of YAML 4 MiB), text that is not
UTF-8, more than 32 levels or 1 000 000 values, duplicate keys, keys that are not text, NaN and
infinities, YAML aliases, anchors, merge keys, tags, and more than one document.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from megatron_hetero.errors import FileFormatError, HeteroError
from megatron_hetero.files.document import (
    MAX_YAML_BYTES,
    Document,
    DocumentBuilder,
    format_keypath,
    read_text,
)
from megatron_hetero.files.parsing import feed_json, feed_yaml
from megatron_hetero.files.schema_faults import describe_faults, near_names
from megatron_hetero.files.writing import check_writable, make_folder, write_text

__all__ = [
    "Document",
    "canonical_json",
    "check_writable",
    "content_hash",
    "format_keypath",
    "make_folder",
    "near_names",
    "read_json",
    "read_long_json",
    "read_text",
    "read_yaml",
    "validate_document",
    "write_json",
    "write_text",
]


def read_yaml(path: Path | str) -> Document:
    """Read a file of one YAML 1.2 document.

    Raises:
        FileFormatError: unreadable, malformed, or one of the refusals of this module.
    """
    builder = DocumentBuilder(Path(path))
    feed_yaml(builder, read_text(Path(path), MAX_YAML_BYTES))
    return builder.document()


def read_json(path: Path | str) -> Document:
    """Read a file of one JSON value (RFC 8259).

    Raises:
        FileFormatError: unreadable, malformed, or one of the refusals of this module.
    """
    builder = DocumentBuilder(Path(path))
    feed_json(builder, read_text(Path(path)))
    return builder.document()


def read_long_json(path: Path | str, most_bytes: int) -> Any:
    """Read the data of a long JSON file that a program wrote, such as a tokenizer: in a tenth of
    the time that `read_json` takes, without lines, and with the last of duplicate keys.

    Raises:
        FileFormatError: unreadable, malformed, nested deep, or of more than so many bytes.
    """
    text = read_text(Path(path), most_bytes)
    # Whole numbers as floats: long ones take quadratic time otherwise.
    try:
        return json.loads(text, parse_int=float)
    except ValueError as error:
        raise FileFormatError(f"{path}: not valid JSON: {error}") from None
    except RecursionError:
        raise FileFormatError(f"{path}: nested too deep to be read") from None


def validate_document[Schema: BaseModel](
    document: Document, model_class: type[Schema], error_class: type[HeteroError]
) -> Schema:
    """Check a document against a pydantic schema.

    Args:
        model_class: the schema: strict, frozen, `extra="forbid"`, `allow_inf_nan=False`.
        error_class: what to raise.
    Returns:
        The instance of `model_class`.
    Raises:
        error_class: lists every fault of the file in its order, one a line, as
            `file:line: key: what is wrong`.
    """
    try:
        # In JSON mode a strict tuple accepts a list, which is all that a file can write.
        return model_class.model_validate_json(json.dumps(document.data))
    except ValidationError as error:
        raise error_class("\n".join(describe_faults(document, model_class, error))) from None


def canonical_json(data: Any) -> str:
    """Write the one JSON text of `data`: sorted keys, no spaces, ASCII."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(data: Any) -> str:
    """Hash (sha256, hex) parsed content; the order, spacing and comments of its file do not
    count."""
    return hashlib.sha256(canonical_json(data).encode()).hexdigest()


def write_json(path: Path | str, data: Any) -> None:
    """Write JSON so that equal data give equal bytes, and no reader ever sees half a file.

    Sorted keys, two spaces, a newline at the end.  Floats are printed by `repr`, which reads back
    to the same bits.

    Raises:
        FileFormatError: the file cannot be written there.
    """
    write_text(path, json.dumps(data, sort_keys=True, indent=2, allow_nan=False) + "\n")
