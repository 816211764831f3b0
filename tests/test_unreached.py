"""No module of the package is there for nothing: a verb, a job or a documented call reaches it."""

from __future__ import annotations

from tools.unreached import unreached


def test_every_module_is_reached() -> None:
    assert unreached() == ()
