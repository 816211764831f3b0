"""Names of the variables that a piece of a script may set."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.held import Definition
from megatron_hetero.model.shell.tree import descendants, source

if TYPE_CHECKING:
    from tree_sitter import Node

_SETTERS = frozenset(
    [
        "read",
        "printf",
        "mapfile",
        "readarray",
        "getopts",
        "let",
        "export",
        "declare",
        "local",
        "readonly",
        "typeset",
        "unset",
    ]
)
_NAME = re.compile(r"[A-Za-z_]\w*")
# Assignments inside of arithmetic; `==` is a comparison.
_IN_ARITHMETIC = re.compile(
    r"([A-Za-z_]\w*)\s*(?:\+\+|--|[-+*/%&|^]?=(?!=)|<<=|>>=)|(?:\+\+|--)(\w+)"
)


def _is_for_a_command(assignment: Node) -> bool:
    """Return whether an assignment stands before a command of its line, and holds for it alone."""
    parent = assignment.parent
    if parent is None or parent.type != "command":
        return False
    name = next((child for child in parent.children if child.type == "command_name"), None)
    if name is None or name.start_byte < assignment.end_byte:
        return False
    # `A=1 cmd` has no newline between; the grammar also takes lines in a row for such a form.
    between = (parent.text or b"")[assignment.end_byte - parent.start_byte :][
        : name.start_byte - assignment.end_byte
    ]
    return b"\n" not in between.replace(b"\\\n", b"")


def set_in_arithmetic(text: str) -> tuple[str, ...]:
    """Return the variables that an arithmetic expression may set."""
    return tuple(match[1] or match[2] for match in _IN_ARITHMETIC.finditer(text))


def assigned_names(node: Node, functions: Mapping[str, tuple[Definition, ...]]) -> tuple[str, ...]:
    """Return the variables that a piece of a script may set, itself or in functions."""
    found: dict[str, None] = {}
    # Functions are read once each, as they may call one another.
    waiting, seen = [node], set()
    while waiting:
        for child in descendants(waiting.pop()):
            kind = child.type
            if kind == "variable_assignment" and child.children:
                # `A=1 command` sets nothing behind the command.
                if _is_for_a_command(child):
                    continue
                found[source(child.children[0]).partition("[")[0]] = None
            elif kind == "for_statement":
                found[source(child.children[1])] = None
            elif kind == "command_name" and source(child) in functions:
                name = source(child)
                if name not in seen:
                    seen.add(name)
                    waiting += [found[0] for found in functions[name] if found is not None]
            elif kind in ("command", "declaration_command", "unset_command") and child.children:
                words = source(child).split()
                # A prefix such as `IFS=, read A` stands before the command that sets.
                if words and words[0].rpartition("=")[2] in _SETTERS | {"IFS"}:
                    found.update(dict.fromkeys(w for w in words[1:] if _NAME.fullmatch(w)))
            elif kind in ("compound_statement", "arithmetic_expansion", "c_style_for_statement"):
                text = source(child)
                if kind != "compound_statement" or text.startswith("(("):
                    found.update(dict.fromkeys(set_in_arithmetic(text)))
            elif kind == "expansion" and any(c.type in (":=", "=") for c in child.children):
                # `${A:=x}` sets A where A has no value.
                found[source(child.children[1])] = None
    return tuple(name for name in found if _NAME.fullmatch(name))
