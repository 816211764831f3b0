"""The one method of replacing a Megatron symbol at run time.

Each replacement has a file of its own beside this one that names the symbol, the reason why no hook
serves, and the fingerprints of the sources it was written against. A symbol whose source is unknown
is never replaced: Megatron changed, and a guess could train something wrong without a sign.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_hetero.runtime.megatron.guarded import ORIGINAL, Guarded


@dataclass(frozen=True)
class Replacement(Guarded):
    """A symbol of Megatron, and its replacement; see `Guarded`."""

    def apply(self, substitute: Callable[..., Any]) -> None:
        """Put `substitute` in place; applying again replaces the earlier substitute.

        Raises:
            MegatronVersionError: the installed symbol is none of the known ones.
        """
        self.check()
        self._put(substitute, self.original())

    def revert(self) -> None:
        """Put Megatron's own symbol back."""
        original = self.original()
        self._put(original, None)

    def _put(self, function: Any, original: Any) -> None:
        owner, name = self.place()
        # A static method must stay one, or an instance would become its first argument.
        is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
        # Guards and later substitutes find Megatron's own function through this attribute.
        if original is not None:
            setattr(function, ORIGINAL, original)
        setattr(owner, name, staticmethod(function) if is_static else function)
