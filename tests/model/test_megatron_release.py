"""The release of Megatron is named in one place, from which every message takes it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import megatron_hetero
from megatron_hetero.model import megatron_release
from megatron_hetero.model.megatron_release import FIRST, LAST, RELEASE, REQUIREMENT

PACKAGE = Path(megatron_hetero.__file__).parent


def texts_in_code(tree: ast.AST) -> Iterator[ast.Constant]:
    """Yield the strings of a module that are no docstrings."""
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield node


def test_no_other_module_names_the_release() -> None:
    found = [
        f"{path}:{text.lineno}"
        for path in PACKAGE.rglob("*.py")
        if path != Path(megatron_release.__file__)
        for text in texts_in_code(ast.parse(path.read_text()))
        if RELEASE in text.value
    ]
    assert not found, "take MEGATRON or RELEASE of megatron_release"


def test_the_requirement_of_the_package_is_the_same() -> None:
    assert f'"{REQUIREMENT}"' in (PACKAGE.parent / "setup.py").read_text()


def test_the_tested_range_is_of_the_release_and_has_the_installed_megatron() -> None:
    assert FIRST.startswith(f"{RELEASE}.") and LAST.startswith(f"{RELEASE}.")
    installed = metadata.version("megatron-core")
    assert FIRST <= installed <= LAST
