"""Dataclasses that a search makes and looks up by the hundred thousand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

__all__ = ["hashed_once", "value"]

if TYPE_CHECKING:
    # The type checker refuses to change an object of a frozen dataclass.
    from dataclasses import dataclass as value
else:

    def value(*, frozen: bool, eq: bool = True, slots: bool = False) -> Callable[[type], type]:
        """Return a decorator for dataclasses whose objects never change, which the type checker
        makes sure of; checked as the program runs, an object takes three times as long to make.
        """
        return dataclass(eq=eq, unsafe_hash=eq and frozen, slots=slots)


def hashed_once[Class: type](of: Class) -> Class:
    """Let the objects of a frozen dataclass remember their hash: a search asks what it keeps in
    tables for it far more often than it makes one."""
    # The dataclass's own hash over all fields.
    compute: Callable[[object], int] = vars(of)["__hash__"]

    def remembered(self: object) -> int:
        known: int | None = self._hash  # type: ignore[attr-defined]
        if known is None:
            known = compute(self)
            # The objects are frozen, so the memory goes past `__setattr__`.
            object.__setattr__(self, "_hash", known)
        return known

    def state(self: object) -> dict[str, object]:
        """Return the fields for other processes, without the hash, since strings hash differently
        there."""
        return {name: held for name, held in self.__dict__.items() if name != "_hash"}

    # The class is changed in place and stays the same class.
    for name, method in {"_hash": None, "__hash__": remembered, "__getstate__": state}.items():
        setattr(of, name, method)
    return of
