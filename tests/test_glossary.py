"""The glossary of docs/concepts.md and the names of the package agree."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import megatron_hetero

PACKAGE = Path(megatron_hetero.__file__).parent
PAGE = PACKAGE.parent / "docs" / "concepts.md"
ROW = re.compile(r"^\| ([^|]+) \| ([^|]+) \| `([\w.]+)` \|$", re.MULTILINE)

_PRIVATE_WORDS = {
    "slab", "sandwich", "walks", "ways", "offers", "growth", "refill", "misses", "calm",
}  # fmt: skip
"""Words that say nothing to the field: no public name may have one."""


def _rows() -> list[tuple[str, str, str]]:
    return ROW.findall(PAGE.read_text(encoding="utf-8").split("## Glossary")[1])


@cache
def _trees() -> dict[Path, ast.Module]:
    return {
        path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))
    }


def _member(body: list[ast.stmt], name: str) -> list[ast.stmt] | None:
    """Return the body of a definition or field; None where `body` has no such name."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name:
            return node.body
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", None) == name:
            return []
    return None


def _is_there(dotted: str) -> bool:
    parts = dotted.split(".")
    folder = PACKAGE
    while parts and (folder / parts[0]).is_dir():
        folder /= parts.pop(0)
    if not parts:
        return (folder / "__init__.py").exists()
    module = folder / f"{parts.pop(0)}.py"
    if not module.exists():
        return False
    body: list[ast.stmt] | None = ast.parse(module.read_text(encoding="utf-8")).body
    for part in parts:
        body = None if body is None else _member(body, part)
    return body is not None


def test_the_glossary_is_not_empty_and_has_each_word_once() -> None:
    words = [word for word, _, _ in _rows()]
    assert len(words) > 30
    assert len(set(words)) == len(words)


@pytest.mark.parametrize("name", [name for _, _, name in _rows()])
def test_a_name_of_the_glossary_is_in_the_code(name: str) -> None:
    assert _is_there(name)


def test_a_name_that_is_not_there_is_noticed() -> None:
    assert not _is_there("cluster.nodes.Nodes")
    assert not _is_there("cluster.specs.Node")
    assert not _is_there("cluster.nodes.Node.no_such_field")


def test_a_public_class_has_one_meaning() -> None:
    places: dict[str, set[Path]] = defaultdict(set)
    for path, tree in _trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].add(path)
    assert {name for name, paths in places.items() if len(paths) > 1} == set()


def test_public_names_use_the_words_of_the_field() -> None:
    found = set()
    for tree in _trees().values():
        for node in tree.body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                words = {w.lower() for w in re.findall(r"[A-Z]?[a-z]+", node.name)}
                if words & _PRIVATE_WORDS:
                    found.add(node.name)
    assert not found
