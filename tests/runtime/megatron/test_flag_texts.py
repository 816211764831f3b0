"""Ranks that are forked do not read the help texts of Megatron's flags again, and have the same."""

from __future__ import annotations

import argparse
import inspect

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_hetero.runtime.megatron import flag_texts


def help_of_flags() -> list[tuple[list[str], str | None]]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    return [(list(action.option_strings), action.help) for action in parser._actions]


def test_texts_are_read_once_and_are_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    flag_texts.REPLACEMENT.revert()
    megatrons = help_of_flags()
    flag_texts.apply()

    def fail(what: object) -> str:
        raise AssertionError(f"the source of {what} is read again")

    monkeypatch.setattr(inspect, "getsource", fail)
    assert help_of_flags() == megatrons
