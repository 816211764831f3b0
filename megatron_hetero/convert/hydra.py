"""Hydra's experiment files as far as FlagScale uses them: a `defaults` list, and references.

A file may name others in `defaults` (`group: option` is `group/option.yaml` beside it); later ones
win, and the file itself stands where `_self_` does, else last
(https://hydra.cc/docs/1.3/advanced/defaults_list/).  `${a.b}` is replaced by the value of that key.
Nothing else is resolved: neither the environment nor any other resolver is asked, and such a value
is unknown, with its reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_hetero.errors import FileFormatError, UnsupportedError
from megatron_hetero.files import Document, read_text, read_yaml

_CONFIG_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)*")
_PACKAGE = re.compile(r"^#\s*@package[\s:]+(\S+)", re.MULTILINE)
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w-]*(?:\.[\w-]+)*)\}")
_TO_FILL_IN = re.compile(r"\?\?\?|/?x{3,}")
MAX_FILES = 64
MAX_REFERENCES = 64
"""Most keys on the way from a reference to a value."""
MAX_REPLACED = 1 << 20
"""Characters that references may bring in: a small file must not be able to fill the memory."""


@dataclass(frozen=True)
class Value:
    """Null, a number, a text, a truth value or a list, and its place in the files.

    A `reason` says why the value is not known; `data` is then what the file says.
    """

    data: Any
    where: str
    reason: str = ""


@dataclass
class Tree:
    """A mapping of the composed experiment."""

    entries: dict[str, Tree | Value] = field(default_factory=dict)

    def branch(self, name: str) -> Tree:
        """Return the mapping of that name; an empty one where there is none."""
        found = self.entries.get(name)
        return found if isinstance(found, Tree) else Tree()

    def find(self, path: str) -> Tree | Value | None:
        """Return the entry at `a.b.c`; None where there is none."""
        found: Tree | Value | None = self
        for part in path.split("."):
            found = found.entries.get(part) if isinstance(found, Tree) else None
        return found

    def leaves(self, prefix: str = "") -> Iterator[tuple[str, Value]]:
        """Yield values with their dotted keys, in the order of the files."""
        for name, entry in self.entries.items():
            key = f"{prefix}.{name}" if prefix else name
            if isinstance(entry, Tree):
                yield from entry.leaves(key)
            else:
                yield key, entry

    def merge(self, other: Tree) -> None:
        """Merge `other` into this mapping: mappings are joined, everything else is replaced."""
        for name, entry in other.entries.items():
            own = self.entries.get(name)
            if isinstance(own, Tree) and isinstance(entry, Tree):
                own.merge(entry)
            else:
                self.entries[name] = entry


@dataclass(frozen=True)
class Experiment:
    """A composed experiment, its references replaced; `referred`: keys that others took over."""

    path: Path
    tree: Tree
    referred: frozenset[str]


def read_experiment(path: Path) -> Experiment:
    """Compose an experiment from the files named in it.

    Raises:
        FileFormatError: a file cannot be read, or refers to what is not there or to itself.
        UnsupportedError: a form of `defaults` or of packages that is not read here.
    """
    tree = _composed(path, ())
    # Hydra's own settings are none of the job's.
    tree.entries.pop("hydra", None)
    references = _Interpolations(tree)
    references.replace(tree)
    return Experiment(path, tree, frozenset(references.known))


def _composed(path: Path, opened: tuple[Path, ...]) -> Tree:
    """Read a file and the files in its defaults, as the mapping of the file's own package."""
    # The chain of files that led here, which must not close.
    if path in opened or len(opened) >= MAX_FILES:
        raise FileFormatError(f"{path}:1: its defaults lead back to itself")
    document = read_yaml(path)
    # A header may place the file elsewhere in the tree.
    package = _PACKAGE.search(read_text(path))
    if package is not None and package[1] != "_group_":
        raise UnsupportedError(f"{path}: @package {package[1]} is not read here; remove the header")
    if not isinstance(document.data, dict):
        raise FileFormatError(f"{path}:1: a mapping is wanted, with keys such as train")
    defaults = document.data.pop("defaults", [])
    if not isinstance(defaults, list):
        raise FileFormatError(f"{document.locate(('defaults',))}: defaults is a list")
    # Merge in the order of `defaults`; a later file wins, and the own content stands at `_self_`.
    own = _tree(document, ())
    tree, is_placed = Tree(), False
    for index, entry in enumerate(defaults):
        if entry == "_self_":
            tree.merge(own)
            is_placed = True
            continue
        # A file of a group lands under the group's name.
        group, names = _default(entry, document.locate(("defaults", index)))
        folder = path.parent / group
        for name in names:
            part = _composed(folder / f"{name}.yaml", (*opened, path))
            # `a/b` becomes the mapping a with the mapping b in it.
            for parent in reversed(group.split("/") if group else []):
                part = Tree({parent: part})
            tree.merge(part)
    # Without `_self_` the own content comes last.
    if not is_placed:
        tree.merge(own)
    return tree


def _default(entry: Any, where: str) -> tuple[str, list[str]]:
    """Read group ("" for the folder of the file itself) and configurations of an entry of
    `defaults`."""
    # NAME, or GROUP: NAME, or GROUP: [NAMES]; null names no file.
    group, option = "", entry
    if isinstance(entry, dict) and len(entry) == 1:
        ((group, option),) = entry.items()
        if option is None:
            return group, []
    names = option if isinstance(option, list) else [option]
    for text in (*names, group or "group"):
        if not isinstance(text, str) or not _CONFIG_NAME.fullmatch(text):
            raise UnsupportedError(
                f"{where}: {entry!r} in defaults is not read here; allowed are _self_, NAME and "
                "GROUP: NAME, files below this one"
            )
    return group, names


def _tree(document: Document, keypath: tuple[str | int, ...]) -> Tree:
    tree = Tree()
    data = document.data
    for part in keypath:
        data = data[part]
    for name, value in data.items():
        inner = (*keypath, name)
        if isinstance(value, dict):
            tree.entries[name] = _tree(document, inner)
        else:
            tree.entries[name] = Value(value, document.locate(inner))
    return tree


@dataclass
class _Interpolations:
    """References `${a.b}` and their values; `known` are the values of keys that were asked for."""

    root: Tree
    known: dict[str, Value] = field(default_factory=dict)
    pending: list[str] = field(default_factory=list)
    num_replaced: int = 0

    def replace(self, tree: Tree) -> None:
        """Replace every reference below `tree`, in place."""
        for name, entry in tree.entries.items():
            if isinstance(entry, Tree):
                self.replace(entry)
            else:
                tree.entries[name] = self.replaced(entry)

    def replaced(self, value: Value) -> Value:
        """Return a value without references."""
        # A list is unknown if one of its items is.
        if isinstance(value.data, list):
            items = [self.replaced(Value(item, value.where)) for item in value.data]
            reason = next((item.reason for item in items if item.reason), "")
            return Value([item.data for item in items], value.where, reason)
        if not isinstance(value.data, str):
            return value
        text = value.data
        if _TO_FILL_IN.fullmatch(text):
            return Value(text, value.where, f"{text} is to be filled in")
        # A reference alone keeps the type of its value; within a text it becomes text.
        whole = _REFERENCE.fullmatch(text)
        if whole is not None:
            found = self.value_of(whole[1], value.where)
            return Value(found.data, value.where, found.reason)
        reason = ""
        for match in _REFERENCE.finditer(text):
            reason = reason or self.value_of(match[1], value.where).reason
        text = _REFERENCE.sub(lambda m: str(self.value_of(m[1], value.where).data), text)
        # Doubling references could fill the memory.
        self.num_replaced += len(text) if text != value.data else 0
        if self.num_replaced > MAX_REPLACED:
            raise FileFormatError(
                f"{value.where}: references bring in more than {MAX_REPLACED} characters"
            )
        if not reason and "${" in text:
            reason = f"{text} is not resolved: only references to keys are"
        return Value(text, value.where, reason)

    def value_of(self, key: str, where: str) -> Value:
        """Return the value of a key that is referred to at `where`."""
        if key in self.known:
            return self.known[key]
        # Keys whose values are being found: one among them would go round.
        if key in self.pending:
            raise FileFormatError(f"{where}: ${{{key}}} refers to itself")
        if len(self.pending) == MAX_REFERENCES:
            raise FileFormatError(f"{where}: references lead through more than {MAX_REFERENCES}")
        found = self.root.find(key)
        if found is None:
            raise FileFormatError(f"{where}: ${{{key}}}: there is no such key")
        if isinstance(found, Tree):
            return Value(f"${{{key}}}", where, f"{key} is a mapping, not a value")
        self.pending.append(key)
        self.known[key] = self.replaced(found)
        self.pending.pop()
        return self.known[key]
