"""A guarded symbol: its fingerprint, what stands in its place, and what refuses an unknown one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from megatron.core.pipeline_parallel import schedules

from megatron_hetero.errors import MegatronVersionError
from megatron_hetero.runtime.megatron import guards
from megatron_hetero.runtime.megatron.guarded import (
    Guarded,
    fingerprint,
    names_of_globals,
    standing_for,
    text_fingerprint,
)

SYMBOLS = guards.guarded()


def test_a_symbol_that_is_gone_is_named() -> None:
    gone = Guarded("megatron.core.utils", "nothing_of_that_name", "a test", {"0": "0.0"})
    with pytest.raises(MegatronVersionError, match="nothing_of_that_name is not there"):
        gone.check()
    with pytest.raises(MegatronVersionError, match="is not there"):
        replace(gone, module="megatron.core.no_such_module").check()


def test_what_watches_a_symbol_still_counts_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol = next(s for s in SYMBOLS if s.name == "forward_step")
    watched = standing_for(schedules.forward_step, lambda *a, **k: None)
    monkeypatch.setattr(schedules, "forward_step", watched)
    symbol.check()
    # Put there by anybody else, it is no longer what was read.
    monkeypatch.setattr(schedules, "forward_step", lambda *a, **k: None)
    with pytest.raises(
        MegatronVersionError, match=r"schedules\.forward_step has the unknown source"
    ):
        symbol.check()


def test_any_change_of_a_source_changes_its_fingerprint() -> None:
    source = "def f(x):\n    return x\n"
    found = {text_fingerprint(text) for text in (source, source + " ", source.upper(), "")}
    assert len(found) == 4 and all(len(one) == 16 for one in found)
    assert fingerprint(text_fingerprint) != fingerprint(names_of_globals)


def test_the_constants_of_a_module_are_its_names_in_capitals() -> None:
    source = "B: int = 1\nA, lower = 2, 3\nA_2 = B_3 = 4\nB += 1\nclass C:\n    D = 5\nx.E = 6\n"
    assert names_of_globals(source) == "A_2\nB\nB\nB_3"
    assert names_of_globals("") == ""


def test_a_stand_in_of_a_stand_in_is_known_as_the_first() -> None:
    def own(x: int) -> int:
        return x

    first = standing_for(own, lambda x: x + 1)
    second = standing_for(first, lambda x: x + 2)
    assert second(1) == 3
    assert second._megatron_hetero_original is own  # type: ignore[attr-defined]


def test_a_method_is_found_in_its_class() -> None:
    symbol = Guarded(guards.__name__.replace("guards", "guarded"), "Guarded.check", "a test", {})
    owner, name = symbol.place()
    assert (owner, name) == (Guarded, "check")
    replace(symbol, known={fingerprint(Guarded.check): "here"}).check()
    with pytest.raises(MegatronVersionError, match=r"Guarded\.check has the unknown source"):
        symbol.check()
