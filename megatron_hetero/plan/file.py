"""plan.json: the plan's file form.  Strict, versioned, and equal plans give equal bytes.

The schema is derived from the frozen dataclasses, so that no field can be in one and not in the
other: a dataclass is an object with the same keys, a tuple an array.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, create_model

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.files import Document, read_json, validate_document, write_json
from megatron_hetero.model.training import unset_fields
from megatron_hetero.plan.checks.validate import first_violations, format_messages
from megatron_hetero.plan.plan import PLAN_SCHEMA_VERSION, Plan

JSON_SCHEMA_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def load_plan(path: Path | str) -> Plan:
    """Read and validate a plan.json.

    Raises:
        FileFormatError: not readable as JSON.
        PlanFormatError: another schema version, a key or value that the schema does not know, or a
            broken invariant; each with file, line and key.
    """
    if Path(path).suffix in (".yaml", ".yml"):
        raise PlanFormatError(
            f"{path}: a plan is a JSON file, not YAML. Of a cluster.yaml one is made by "
            f"`megatron-hetero plan --cluster {path} --model FILE -o plan.json`"
        )
    return _plan_from_document(read_json(path))


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write a plan, atomically; equal plans give equal bytes."""
    write_json(path, plan_to_data(plan))


def plan_to_data(plan: Plan) -> dict[str, Any]:
    """Convert a plan to JSON data.  Times stay floats even where they are whole, so bytes stay
    equal."""
    data = _to_data(plan, Plan)
    return typing.cast(dict[str, Any], data)


def plan_from_data(data: Any, source: str = "plan") -> Plan:
    """Validate parsed JSON data and build its plan; `source` stands where errors name the file.

    Raises:
        PlanFormatError: as `load_plan`.
    """
    return _plan_from_document(Document(data, Path(source), _AllOnLineOne()))


def plan_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of plan.json, for editors."""
    schema = _plan_model().model_json_schema()
    return {"$schema": JSON_SCHEMA_DIALECT, **schema}


def _plan_from_document(document: Document) -> Plan:
    # The version is read from raw data, as the schema knows only its own version.
    _check_schema_version(document)
    model = validate_document(document, _plan_model(), PlanFormatError)
    # The pydantic model has only data; the plan itself is made of dataclasses.
    plan = typing.cast(Plan, _from_model(model, Plan))
    # All violations get file and line, which only the document knows.
    violations = first_violations(plan)
    if violations:
        raise PlanFormatError(
            format_messages([f"{document.locate(v.keypath)}: {v.message}" for v in violations])
        )
    return plan


def _check_schema_version(document: Document) -> None:
    """Check the version before anything else: the keys of another version mean nothing to this
    one."""
    data = document.data
    if not isinstance(data, dict) or "schema_version" not in data:
        is_serving = isinstance(data, dict) and data.get("kind") == "serving"
        what = "a serving plan, which `launch` and `doctor` read" if is_serving else "no plan.json"
        raise PlanFormatError(
            f"{document.locate(())}: no schema_version; this is {what}. "
            "`megatron-hetero plan` writes a plan of training."
        )
    # `True == 1` in Python, and a truth value is no version.
    version = data["schema_version"]
    if version != PLAN_SCHEMA_VERSION or isinstance(version, bool):
        raise PlanFormatError(
            f"{document.locate(['schema_version'])}: schema_version is {version!r}; this version "
            f"of megatron-hetero reads {PLAN_SCHEMA_VERSION}. Plan again, or use the version that "
            "made the plan."
        )


class _AllOnLineOne(Mapping[tuple[str | int, ...], int]):
    """Lines of data that came from no file."""

    def __getitem__(self, keypath: tuple[str | int, ...]) -> int:
        return 1

    def __iter__(self) -> typing.Iterator[tuple[str | int, ...]]:
        return iter(())

    def __len__(self) -> int:
        return 0


_STRICT = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)


@cache
def _plan_model() -> type[BaseModel]:
    return _schema_model(Plan)


def _schema_model(dataclass_type: type[Any]) -> type[BaseModel]:
    """Build the pydantic model with the fields, defaults and documentation of a dataclass."""
    fields: dict[str, Any] = {}
    hints = _hints(dataclass_type)
    # A field without default has to be in the file; `...` is pydantic's word for that.
    for field in dataclasses.fields(dataclass_type):
        default: Any = ...
        if field.default is not dataclasses.MISSING:
            default = field.default
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields[field.name] = (_schema_type(hints[field.name]), default)
    return create_model(
        dataclass_type.__name__,
        __config__=_STRICT,
        __doc__=dataclass_type.__doc__,
        **fields,
    )


def _schema_type(hint: Any) -> Any:
    """Replace every dataclass in a field's type by its model."""
    if dataclasses.is_dataclass(hint):
        return _schema_model(typing.cast(type[Any], hint))
    arguments = typing.get_args(hint)
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        # `X | None`, made again from the models of its parts.
        return typing.Union[tuple(_schema_type(argument) for argument in arguments)]  # noqa: UP007
    if origin is tuple:
        # Tuples in a plan have any length and one type, which JSON has as a list.
        return types.GenericAlias(tuple, (_schema_type(arguments[0]), ...))
    if origin is Mapping:
        return types.GenericAlias(dict, (str, _schema_type(arguments[1])))
    return hint


_hints: Callable[[Any], dict[str, Any]] = cache(typing.get_type_hints)
"""Annotations of a class, which Python would evaluate anew at every call."""


def _from_model(value: Any, hint: Any) -> Any:
    """Convert a validated value of `_schema_type(hint)` to a value of `hint`."""
    hint = _without_none(hint)
    if value is None:
        return None
    if dataclasses.is_dataclass(hint):
        hints = _hints(hint)
        fields = {name: _from_model(getattr(value, name), of) for name, of in hints.items()}
        return typing.cast(type[Any], hint)(**fields)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(_from_model(item, arguments[0]) for item in value)
    if typing.get_origin(hint) is Mapping:
        return {key: _from_model(item, arguments[1]) for key, item in value.items()}
    return float(value) if hint is float else value


def _to_data(value: Any, hint: Any) -> Any:
    """Convert a value of `hint` to JSON data."""
    hint = _without_none(hint)
    if value is None:
        return None
    if dataclasses.is_dataclass(hint):
        # Fields written only if set are left out, so that older files keep their bytes.
        hints, unset = _hints(hint), unset_fields(value)
        return {
            name: _to_data(getattr(value, name), of)
            for name, of in hints.items()
            if name not in unset
        }
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return [_to_data(item, arguments[0]) for item in value]
    if typing.get_origin(hint) is Mapping:
        return {key: _to_data(item, arguments[1]) for key, item in value.items()}
    # 0.0 and -0.0, 2 and 2.0 are equal, and so must be their text.
    if hint is float:
        return float(value) + 0.0
    # A program may count with numpy.
    return int(value) if hint is int and isinstance(value, Integral) else value


def _without_none(hint: Any) -> Any:
    """Return `X` of `X | None`; the plan has no other unions."""
    if typing.get_origin(hint) is types.UnionType:
        (hint,) = (a for a in typing.get_args(hint) if a is not types.NoneType)
    return hint
