"""Settings of all tests."""

from __future__ import annotations

import gc
import signal
import sys

import hypothesis
import pytest

# Machines of CI are shared: a slow example is no fault.  Whole tests have pytest's timeout.
# A run says the same of the same code: what fails is a fault of the change at hand.  New examples
# are for `--hypothesis-profile=random` and `tools/prove_planner.py`.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True)
hypothesis.settings.register_profile("random", deadline=None, derandomize=False)
hypothesis.settings.load_profile("same")

# Tests train with local layers: Megatron looks for Transformer Engine once, when it is imported.
# Tests with its layers have processes of their own (`tests/runtime/transformer_engine`).
sys.modules.setdefault("transformer_engine", None)  # type: ignore[arg-type]

# A run in the background ignores Ctrl-C, and so would all that it starts: tests send it.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = ("test_examples.py", "test_pages.py")
"""Begun first, or one core would work on them alone at the end."""


# Imports make objects that stay (torch and Megatron: millions): to look through them again and
# again for garbage, while more are imported, is in vain.
gc.disable()


def pytest_collection_finish() -> None:
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)
