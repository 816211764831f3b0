"""The one way in which a Megatron symbol is replaced at run time.

Each replacement has a file of its own beside this one that says which symbol, why no hook serves,
and the fingerprints of the sources it was written against.  A symbol whose source is unknown is
never replaced: Megatron changed, and guessing would train something wrong in silence.
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
    """First 16 hex digits of the sha256 of a function's source text."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Replacement:
    """A symbol of Megatron and what stands in for it.

    `name` is one of the module's, or "Class.method" for a method of one of its classes, static or
    not.
    `known` maps fingerprints of the original's source to the releases that carry it.
    """

    module: str
    name: str
    reason: str
    known: Mapping[str, str]

    def original(self) -> Callable[..., Any]:
        """Megatron's own, also while it is replaced."""
        owner, name = self._place()
        current = getattr(owner, name)
        return getattr(current, _ORIGINAL, current)

    def apply(self, substitute: Callable[..., Any]) -> None:
        """Put `substitute` in place; applying again replaces the earlier substitute.

        Raises:
            MegatronVersionError: the installed symbol is none of the known ones.
        """
        self.check()
        setattr(substitute, _ORIGINAL, self.original())
        self._put(substitute)

    def check(self) -> None:
        """Refuse an installed symbol whose source is none of the known ones.

        Raises:
            MegatronVersionError: names the symbol and the releases that are known.
        """
        owner, name = self._place()
        if not hasattr(owner, name):
            raise MegatronVersionError(self._unknown("is not there"))
        found = fingerprint(self.original())
        if found not in self.known:
            raise MegatronVersionError(self._unknown(f"has the unknown source {found}"))

    def revert(self) -> None:
        """Put Megatron's own symbol back."""
        self._put(self.original())

    def _put(self, function: Callable[..., Any]) -> None:
        owner, name = self._place()
        is_static = isinstance(vars(owner).get(name), staticmethod)
        setattr(owner, name, staticmethod(function) if is_static else function)

    def _place(self) -> tuple[Any, str]:
        """The module or class, and the name of the symbol in it."""
        *path, name = self.name.split(".")
        owner = import_module(self.module)
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
