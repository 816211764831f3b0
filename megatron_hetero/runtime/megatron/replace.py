"""The one method of replacing a Megatron symbol at run time.

Each replacement has a file of its own beside this one that names the symbol, the reason why no hook
serves, and the fingerprints of the sources it was written against. A symbol whose source is unknown
is never replaced: Megatron changed, and a guess could train something wrong without a sign.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from megatron_hetero.errors import MegatronVersionError

_ORIGINAL = "_megatron_hetero_original"


def fingerprint(function: Callable[..., Any]) -> str:
    """Hash a function's source text: the first 16 hex digits of its sha256."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Replacement:
    """A symbol of Megatron, and its replacement.

    `name` is one of the module's, or "Class.method" for a static method of one of its classes.
    `known` maps fingerprints of the original's source to the releases that carry it.
    """

    module: str
    name: str
    reason: str
    known: Mapping[str, str]

    def original(self) -> Callable[..., Any]:
        """Return Megatron's own symbol, also while it is replaced."""
        owner, name = self._place()
        current = getattr(owner, name)
        return getattr(current, _ORIGINAL, current)

    def apply(self, substitute: Callable[..., Any]) -> None:
        """Put `substitute` in place; applying again replaces the earlier substitute.

        Raises:
            MegatronVersionError: the installed symbol is none of the known ones.
        """
        owner, name = self._place()
        if not hasattr(owner, name):
            raise MegatronVersionError(self._unknown("is not there"))
        original = self.original()
        found = fingerprint(original)
        if found not in self.known:
            raise MegatronVersionError(self._unknown(f"has the unknown source {found}"))
        setattr(substitute, _ORIGINAL, original)
        setattr(owner, name, substitute if owner is self._module() else staticmethod(substitute))

    def revert(self) -> None:
        """Put Megatron's own symbol back."""
        owner, name = self._place()
        original = self.original()
        setattr(owner, name, original if owner is self._module() else staticmethod(original))

    def _module(self) -> Any:
        return import_module(self.module)

    def _place(self) -> tuple[Any, str]:
        """Return the module or class, and the name of the symbol in it."""
        *path, name = self.name.split(".")
        owner = self._module()
        for part in path:
            owner = getattr(owner, part)
        return owner, name

    def _unknown(self, what: str) -> str:
        version = metadata.version("megatron-core")
        known = ", ".join(sorted(set(self.known.values())))
        return (
            f"megatron-core {version}: {self.module}.{self.name} {what}. It would be replaced "
            f"({self.reason}) and is known in {known}. Install a tested release: "
            f'pip install "megatron-core>=0.19.2,<0.20".'
        )
