"""Check that Transformer Engine is usable; an installed package need not be.

A build for another torch or CUDA, or the empty package that its index entry can leave, raises many
kinds of errors on import, of which Megatron expects one. A package that cannot be used is hidden,
so that Megatron finds none and takes its own layers.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec

_PACKAGES = ("transformer_engine", "transformer_engine_torch")


def hide_if_broken() -> str | None:
    """Hide a package that cannot be imported from all later imports.

    Returns:
        The reason why there is no Transformer Engine; None if there is a usable one.
    """
    if any(sys.modules.get(name, ...) is None for name in _PACKAGES):
        return "it was hidden, because it cannot be imported"
    if find_spec("transformer_engine") is None:
        return "it is not installed"
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # what a broken build raises is anybody's guess
        for name in list(sys.modules):
            if name.partition(".")[0] in _PACKAGES:
                del sys.modules[name]
        for name in _PACKAGES:
            sys.modules[name] = None  # type: ignore[assignment]
        return f"it cannot be imported ({type(error).__name__}: {error})"
    return None
