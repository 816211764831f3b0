"""Refusals of a cluster file: with its line and key, and near names for what is not there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from megatron_hetero.errors import ClusterError, some_of
from megatron_hetero.files import Document, format_keypath, near_names


@dataclass(frozen=True)
class References:
    """The names that a cluster file defines, and the file itself, for messages."""

    document: Document
    nodes: tuple[str, ...]
    sites: tuple[str, ...]

    def fail(self, keypath: Sequence[str | int], message: str) -> NoReturn:
        """Raise `ClusterError` as `file:line: key: message`."""
        raise ClusterError(f"{self.place(keypath)}: {message}")

    def place(self, keypath: Sequence[str | int]) -> str:
        """Return `file:line: key`, of the part of a key path that the file has."""
        key = format_keypath(self.document.existing(keypath))
        return f"{self.document.locate(keypath)}{': ' + key if key else ''}"

    def check(
        self, keypath: Sequence[str | int], kind: str, name: str, known: Iterable[str]
    ) -> None:
        """Raise `ClusterError` when `name`, at `keypath` of the file, is not one of `known`.

        Args:
            kind: what the name is of, for the message ("node", "site").
            known: the names that are there.
        """
        names = tuple(known)
        if name not in names:
            hint = near_names(name, names)
            self.fail(keypath, f'there is no {kind} "{name}"{hint}; there is {listed(names)}')


def listed(names: Sequence[str]) -> str:
    """Write `"a"` alone, or `{"a", "b" and 3 more}`."""
    if len(names) == 1:
        return f'"{names[0]}"'
    quoted = [f'"{name}"' for name in names]
    return f"{{{some_of(quoted)}}}"
