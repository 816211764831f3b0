"""Nothing of the package is there for nothing: a verb, a job or a documented call reaches it."""

from __future__ import annotations

import ast

from tools.unreached import FOR_TESTS, Names, unreached, unreached_names


def test_every_module_is_reached() -> None:
    assert unreached() == ()


def test_every_name_is_reached() -> None:
    assert unreached_names() == ()


def test_a_name_that_nobody_has_is_found() -> None:
    names = Names()
    module = "megatron_hetero.units"
    lonely = ast.parse("def lonely():\n    return 1\n\nLONELY = lonely()\n").body
    names.tops[module, "lonely"].append(lonely[0])
    names.tops[module, "LONELY"].append(lonely[1])
    names.reach()
    assert names.left() == (f"{module}.LONELY", f"{module}.lonely")


def test_what_tests_look_through_exists() -> None:
    names = Names()
    for path in FOR_TESTS:
        parts = ("megatron_hetero." + path).split(".")
        assert any(
            (".".join(parts[:-at]), parts[-at]) in names.tops for at in (1, 2)
        ), path
