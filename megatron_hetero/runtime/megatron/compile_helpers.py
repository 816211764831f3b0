"""`megatron.core.datasets.utils.compile_helpers`: the wheel calls `make` without a Makefile.

The function runs `make` in the installed package and ends the process when that fails.  The wheel
carries the compiled helper already, so there is nothing to build; a source tree whose helper is not
built yet keeps Megatron's own behaviour.
"""

from __future__ import annotations

from megatron_hetero.model.megatron_release import TESTED
from megatron_hetero.runtime.megatron.replace import Replacement

REPLACEMENT = Replacement(
    module="megatron.core.datasets.utils",
    name="compile_helpers",
    reason="the wheel has the built helper but no Makefile",
    known={"84029a50ae8cfac1": TESTED},
    is_stock=True,
)


def _compile_helpers() -> None:
    try:
        # The helper that the wheel brings can be imported: there is nothing to build.
        from megatron.core.datasets import helpers_cpp  # noqa: F401
    except ImportError:
        REPLACEMENT.original()()


def apply() -> None:
    """Replace the symbol in this process."""
    REPLACEMENT.apply(_compile_helpers)
