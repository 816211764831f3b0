"""Frozen dataclasses that compute each hash once."""

from __future__ import annotations

from collections.abc import Callable


def hashed_once[Class: type](of: Class) -> Class:
    """Let the objects of a frozen dataclass remember their hash: a search asks what it keeps in
    tables for it far more often than it makes one."""
    # The dataclass's own hash over all fields.
    compute: Callable[[object], int] = vars(of)["__hash__"]

    def remembered(self: object) -> int:
        # The objects are frozen, so the memory goes past `__setattr__`.
        known: int | None = self.__dict__.get("_hash")
        if known is None:
            known = self.__dict__["_hash"] = compute(self)
        return known

    def state(self: object) -> dict[str, object]:
        """Return the fields for other processes, without the hash, since strings hash differently
        there."""
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    # The class is changed in place and stays the same class.
    for name, method in {"__hash__": remembered, "__getstate__": state}.items():
        setattr(of, name, method)
    return of
