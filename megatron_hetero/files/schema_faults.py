"""Faults found by a schema in a file, in words for the author of the file."""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from megatron_hetero.files.document import Document, format_keypath


def describe_faults(
    document: Document, model_class: type[BaseModel], error: ValidationError
) -> list[str]:
    """Write `file:line: key: fault`, one for each fault, in the order of the file."""
    # Faults in the order of their lines; one that follows from another is left out.
    found = error.errors(include_url=False)
    faults = []
    for fault in found:
        # Entries with faults of their own are missing from the list, which then looks short.
        if fault["type"] == "too_short" and _is_consequence(
            fault["loc"], [f["loc"] for f in found]
        ):
            continue
        # A schema's own labels, such as branches of a union, are not in the file.
        keypath = document.existing(fault["loc"])
        if fault["type"] in _WRONG_FORMS and any(
            _is_other_form(keypath, document.existing(other["loc"]), other, fault)
            for other in found
        ):
            continue
        key = format_keypath(keypath)
        text = _fault_text(dict(fault), document, model_class)
        faults.append((document.line(keypath), f"{key}: {text}" if key else text))
    return [f"{document.path}:{line}: {text}" for line, text in sorted(faults)]


_LONGEST_VALUE = 200
"""Characters of a value that a message shows."""
_WRONG_FORMS = {"int_type", "tuple_type", "list_type", "dict_type", "model_type", "string_type"}
"""Faults of a value that another form of the value does not have."""


def _is_other_form(
    keypath: Sequence[str | int],
    of_other: Sequence[str | int],
    other: ErrorDetails,
    fault: ErrorDetails,
) -> bool:
    """Return whether a value, or an entry of it, has a fault in the form that its author chose."""
    if other is fault or (other["type"] in _WRONG_FORMS and of_other == keypath):
        return False
    return tuple(of_other[: len(keypath)]) == tuple(keypath)


def _is_consequence(location: Sequence[str | int], others: Sequence[Sequence[str | int]]) -> bool:
    """Return whether a list is short only because pydantic left out wrong entries."""
    depth = len(location)
    return any(len(o) > depth and tuple(o[:depth]) == tuple(location) for o in others)


def near_names(name: str, known: Iterable[str]) -> str:
    """Write ` (did you mean "x"?)`, or nothing when no known name is near."""
    # Case does not count in a wrong name.
    by_folded = {k.casefold(): k for k in known}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=3, cutoff=0.6)
    if not near:
        return ""
    return " (did you mean " + " or ".join(f'"{by_folded[n]}"' for n in near) + "?)"


def _fault_text(fault: dict[str, Any], document: Document, model_class: type[BaseModel]) -> str:
    location: Sequence[str | int] = fault["loc"]
    kind, message = str(fault["type"]), str(fault["msg"])
    # Kinds of faults with words of our own; all others have pydantic's.
    if kind == "extra_forbidden":
        known = _keys(_model_at(model_class, location[:-1]))
        unknown = str(location[-1])
        allowed = f"; allowed: {', '.join(known)}" if known else "; remove it"
        return f'unknown key "{unknown}"{near_names(unknown, known)}{allowed}'
    if kind == "missing":
        return f'the key "{location[-1]}" is missing; add it'
    if kind == "value_error":
        return message.removeprefix("Value error, ")
    if kind == "too_short":
        least, there = fault["ctx"]["min_length"], fault["ctx"]["actual_length"]
        return f"needs {least} or more entries; it has {there or 'none'}"
    if kind == "too_long" and isinstance(fault["input"], list | dict):
        return f"has {len(fault['input'])} entries; at most {fault['ctx']['max_length']} are read"
    message = message[:1].lower() + message[1:]
    # The value itself, where it is short enough to print.
    if document.existing(location) and not isinstance(fault["input"], dict | list):
        value = json.dumps(fault["input"], ensure_ascii=False)
        is_short = len(value) <= _LONGEST_VALUE
        message += f"; it is {value}" if is_short else f"; it begins {value[:_LONGEST_VALUE]}"
    return message


def _keys(model: type[BaseModel] | None) -> list[str]:
    if model is None:
        return []
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_at(model: type[BaseModel], location: Sequence[str | int]) -> type[BaseModel] | None:
    """Find the schema class that describes the value at `location`; None where that is
    ambiguous."""
    # Schema classes that a value at this part of the path may have.
    candidates: list[Any] = [model]
    for part in location:
        following: list[Any] = []
        for candidate in candidates:
            following += _children(candidate, part)
        # A part that leads nowhere is a label of the schema (a union's branch): stay.
        candidates = following or candidates
    models = [m for c in candidates for m in _models(c)]
    return models[0] if len(models) == 1 else None


def _children(annotation: Any, part: str | int) -> list[Any]:
    """Return the annotations of the entry `part` of a value annotated `annotation`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [
            field.annotation
            for name, field in annotation.model_fields.items()
            if part in (name, field.alias)
        ]
    # `Annotated` and unions are looked through; dicts and lists lead to their entries.
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _children(arguments[0], part)
    if origin in (Union, types.UnionType):
        return [child for a in arguments for child in _children(a, part)]
    if origin is dict and isinstance(part, str):
        return [arguments[1]]
    if origin in (list, tuple) and isinstance(part, int):
        return [arguments[0]]
    return []


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) is Annotated:
        return _models(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [m for a in get_args(annotation) for m in _models(a)]
    return []
