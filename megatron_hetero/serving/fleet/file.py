"""serve.json: a serving plan as a file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.files import read_json, validate_document, write_json
from megatron_hetero.files.format_version import Version1
from megatron_hetero.serving.fleet.plan import ServingPlan, check_plan

KIND = "serving"


class _FleetPlan(BaseModel):
    """The plan in its frame."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False)

    kind: Literal["serving"]
    version: Version1
    plan: ServingPlan


def is_serving_plan(path: Path | str) -> bool:
    """Tell if a file is a serving plan, and not one of training.

    Raises:
        FileFormatError: it is no JSON.
    """
    data = read_json(path).data
    return isinstance(data, dict) and data.get("kind") == KIND


def load_serving_plan(path: Path | str) -> ServingPlan:
    """Read serve.json.

    Raises:
        FileFormatError: the file is not well-formed.
        PlanFormatError: it breaks the schema or an invariant of plans.
    """
    document = read_json(path)
    data = document.data
    if not isinstance(data, dict) or "kind" not in data:
        of_training = isinstance(data, dict) and "schema_version" in data
        found = "a plan of training" if of_training else "no plan"
        raise PlanFormatError(
            f"{document.locate(())}: this is {found}; a serving plan is what `megatron-hetero "
            "serve-plan` writes."
        )
    plan = validate_document(document, _FleetPlan, PlanFormatError).plan
    check_plan(plan, str(path))
    return plan


def save_serving_plan(plan: ServingPlan, path: Path | str) -> None:
    """Write serve.json; equal plans give equal bytes."""
    write_json(path, serving_plan_data(plan))


def serving_plan_data(plan: ServingPlan) -> dict[str, Any]:
    """Return the content of the file."""
    return {"kind": KIND, "version": 1, "plan": _plain(asdict(plan))}


def serving_plan_json_schema() -> dict[str, Any]:
    """Return the JSON Schema of serve.json."""
    schema = _FleetPlan.model_json_schema()
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["title"] = "megatron-hetero serve.json"
    return schema


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(part) for key, part in value.items()}
    # Tuples become lists, as JSON has them.
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value
