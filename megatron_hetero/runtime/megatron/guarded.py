"""Symbols of Megatron with known source, and the refusal of unknown source.

This package relies on details that no release of Megatron promises.  Each such symbol states the
fingerprints of the sources that were read; any other is refused before the ranks of a job meet,
for guessing would train something wrong in silence.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from megatron_hetero.errors import MegatronVersionError
from megatron_hetero.model.megatron_release import INSTALL

ORIGINAL = "_megatron_hetero_original"
"""Attribute of a substitute: what it stands in for."""


@functools.cache
def fingerprint(function: Callable[..., Any]) -> str:
    """Hash the source text of a function or class: the first 16 hex digits of its sha256."""
    return text_fingerprint(inspect.getsource(function))


def standing_for(original: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` as a stand-in for a symbol; the guards see the symbol through the stand-in.

    Args:
        original: the symbol, or a stand-in for it.
    """
    # A new object for the attribute, which must not appear on `function` itself.
    stand_in = functools.partial(function)
    setattr(stand_in, ORIGINAL, getattr(original, ORIGINAL, original))
    return stand_in


def text_fingerprint(source: str) -> str:
    """Hash a source text, as `fingerprint` does."""
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def names_of_globals(source: str) -> str:
    """Return the constants set at the top level of a module's source, sorted, one a line."""
    return "\n".join(sorted(name for node in ast.parse(source).body for name in _targets(node)))


def _targets(node: ast.stmt) -> Iterator[str]:
    # Plain and annotated assignments to names in capitals.
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    for target in targets:
        if isinstance(target, ast.Name) and target.id.isupper():
            yield target.id


@dataclass(frozen=True)
class Guarded:
    """A symbol of Megatron that this package relies on, replaces or watches.

    `name` is one of the module's, or "Class.method"; "" stands for the names of all its constants.
    `known` maps fingerprints to the releases that carry the source.  `is_stock` marks what jobs of
    stock Megatron's own touch too.
    """

    module: str
    name: str
    reason: str
    known: Mapping[str, str]
    is_stock: bool = False

    def original(self) -> Callable[..., Any]:
        """Return Megatron's own, also while it is replaced."""
        owner, name = self.place()
        current = getattr(owner, name)
        # A stand-in says what it stands for.
        return getattr(current, ORIGINAL, current)

    def check(self) -> None:
        """Compare the installed symbol with the known ones.

        Raises:
            MegatronVersionError: it is not there, or none of the known ones.
        """
        try:
            found = self.found()
        except (ImportError, AttributeError, OSError):
            raise MegatronVersionError(self._unknown("is not there")) from None
        if found not in self.known:
            raise MegatronVersionError(self._unknown(f"has the unknown source {found}"))

    def found(self) -> str:
        """Return the fingerprint of the installed symbol."""
        if self.name:
            return fingerprint(self.original())
        # One hash of all names: a global that is new or gone counts as a change.
        return text_fingerprint(names_of_globals(inspect.getsource(import_module(self.module))))

    def place(self) -> tuple[Any, str]:
        """Return the module or class, and the name of the symbol in it."""
        *path, name = self.name.split(".")
        owner: Any = import_module(self.module)
        for part in path:
            owner = getattr(owner, part)
        return owner, name

    def _unknown(self, what: str) -> str:
        known = ", ".join(sorted(set(self.known.values())))
        symbol = f"{self.module}.{self.name}" if self.name else f"constants of {self.module}"
        return (
            f"megatron-core {_version()}: {symbol} {what}. This package relies on it "
            f"({self.reason}) and knows it in {known}. Install a tested release: {INSTALL}."
        )


def _version() -> str:
    try:
        return metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return "of a source tree"
