"""Worked examples in docstrings print what they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from types import ModuleType

import pytest

import megatron_hetero

ROOMS = ("cluster", "convert", "cost", "model", "plan", "schedule", "units")
"""Rooms that load neither torch nor Megatron."""


def _modules() -> list[ModuleType]:
    names = [
        info.name
        for info in pkgutil.walk_packages(megatron_hetero.__path__, "megatron_hetero.")
        if info.name.split(".")[1] in ROOMS
    ]
    return [importlib.import_module(name) for name in names]


@pytest.fixture(scope="module")
def modules() -> list[ModuleType]:
    return _modules()


def test_examples_print_what_they_show(modules: list[ModuleType]) -> None:
    results = [doctest.testmod(module) for module in modules]
    assert sum(result.attempted for result in results) >= 25
    assert sum(result.failed for result in results) == 0
