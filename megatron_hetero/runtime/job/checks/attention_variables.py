"""Transformer Engine's variables of the environment beside `--attention-backend`.

Megatron sets them from the flag when it builds the model, on each rank, and stops at an assertion
where they are set otherwise (`LanguageModule._set_attention_backend`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_hetero.errors import UsageError

_NAMES = ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN")
_EXPECTED = {
    "flash": (1, 0, 0),
    "fused": (0, 1, 0),
    "unfused": (0, 0, 1),
    "auto": (1, 1, 1),
    "local": (0, 0, 0),
}
"""Attention -> Megatron's values of the variables, in order."""


def check_attention_variables(args: Any, environment: Mapping[str, str]) -> None:
    """Refuse variables that contradict `--attention-backend`.

    Raises:
        UsageError: names the first variable, its value, and what to do.
    """
    asked = args.attention_backend.name
    # An attention without a row in the table leaves the variables alone.
    for name, expected in zip(_NAMES, _EXPECTED.get(asked, ()), strict=False):
        found = environment.get(name)
        if found is not None and found != str(expected):
            raise UsageError(
                f"the environment has {name}={found}, and --attention-backend {asked} sets it to "
                f"{expected}. Unset {', '.join(_NAMES)}, and choose the attention with "
                "--attention-backend (auto, flash, fused or unfused)."
            )
