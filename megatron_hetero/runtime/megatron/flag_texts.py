"""`ArgumentGroupFactory._get_field_docstrings`: every parse of flags reads their help texts anew.

Megatron takes the texts from the sources of its configurations, which is a third of what a small
rank does.  Ranks that are forked inherit them.
"""

from __future__ import annotations

import argparse
from typing import Any

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.training.argument_utils",
    name="ArgumentGroupFactory._get_field_docstrings",
    reason="forked ranks inherit what it read",
    known={"805106b770276d57": TESTED},
)


def apply() -> None:
    """Read every text once, and replace the symbol in this process by a function with a memory."""
    from megatron.training.arguments import add_megatron_arguments

    original = REPLACEMENT.original()
    texts: dict[type, dict[str, str]] = {}

    def remembered(factory: Any, config: type) -> dict[str, str]:
        if config not in texts:
            texts[config] = original(factory, config)
        return texts[config]

    REPLACEMENT.apply(remembered)
    # One parser asks for every text, before the ranks are forked.
    add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
