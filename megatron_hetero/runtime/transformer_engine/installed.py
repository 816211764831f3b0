"""Check that Transformer Engine is usable; an installed package need not be.

A build for another torch or CUDA, or the empty package that its index entry can leave, raises many
kinds of errors on import, of which Megatron expects one. A package that cannot be used is hidden,
so that Megatron finds none and takes its own layers. Where there is no GPU it is hidden in any
case; `layers` then brings it back for a job that names its layers.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.util import find_spec

import torch

from megatron_hetero.runtime.transformer_engine.cards_at_import import answered_by_the_driver

PACKAGES = ("transformer_engine", "transformer_engine_torch")
HIDDEN_BEFORE = "it was hidden, because it cannot be imported"
NO_GPU = "there is no GPU"

# Torch then asks the driver (NVML) whether there is a GPU.  Otherwise the question alone, which
# Transformer Engine's import asks too, marks the process as one that cannot fork ranks
# (`runtime.job.local`).
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


def why_unusable() -> str | None:
    """Hide a package that cannot be used here; return the reason, or None if it is usable."""
    # None among the modules is what `hide` leaves, and what stops an import.
    if any(sys.modules.get(name, ...) is None for name in PACKAGES):
        return HIDDEN_BEFORE
    if torch.cuda.is_available():
        return hide_if_broken()
    hide()
    return NO_GPU


def hide_if_broken() -> str | None:
    """Hide a package that cannot be imported from all later imports.

    Returns:
        The reason why there is no Transformer Engine; None if there is a usable one.
    """
    if any(sys.modules.get(name, ...) is None for name in PACKAGES):
        return HIDDEN_BEFORE
    if find_spec("transformer_engine") is None:
        return "it is not installed"
    try:
        with answered_by_the_driver():
            importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # what a broken build raises is anybody's guess
        hide()
        return f"it cannot be imported ({type(error).__name__}: {error})"
    return None


def hide() -> None:
    """Hide the package from all later imports."""
    # Modules that are imported already would stay usable.
    forget()
    for name in PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]


def forget() -> None:
    """Forget all imported modules of the package, and a former hiding of the package."""
    for name in list(sys.modules):
        if name.partition(".")[0] in PACKAGES:
            del sys.modules[name]


REASON = why_unusable()
"""Reason why this process found no usable package at its start; None where it did."""
