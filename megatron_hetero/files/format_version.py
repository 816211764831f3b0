"""The number of a file's format."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticKnownError


def _number(given: object) -> object:
    # True equals 1, also for a schema that is strict.
    if isinstance(given, bool):
        raise PydanticKnownError("literal_error", {"expected": "1"})
    return given


Version1 = Annotated[Literal[1], BeforeValidator(_number)]
"""Version 1, as a number; `true` is none."""
