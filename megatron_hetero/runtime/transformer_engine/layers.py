"""Which layers this process has without a GPU: Transformer Engine's own, or only local ones.

Megatron asks for the package once, when it is imported. So a door of the program that knows the job
calls `provide_for` before that; a process in which Megatron was imported without it keeps local
layers, and says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from megatron_hetero.errors import UsageError
from megatron_hetero.model.flag_table import flag_table
from megatron_hetero.runtime import backend
from megatron_hetero.runtime.transformer_engine import bridges, finder, installed

TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"
_FLAG = "--transformer-impl"
_MEGATRON = "megatron.core.extensions.transformer_engine"

# With Transformer Engine the job's own choice counts: its kernels, and Apex's, have counterparts.
_UNFUSED_GRADIENTS = "--no-gradient-accumulation-fusion"
_ONLY_LOCAL = ("--transformer-impl=local", _UNFUSED_GRADIENTS)

_state: list[str | None] = []
"""The answer of `provide`, once it was asked: None, or the reason."""


def names(megatron: Sequence[str]) -> str:
    """Return the layers that Megatron's flags name: the last word counts, the default is
    Transformer Engine."""
    table = flag_table()
    try:
        options = table.split(table.known_part(megatron))
    except UsageError:
        return LOCAL  # Megatron's parser refuses these flags, in its own words
    named = [option.values[0] for option in options if option.name == _FLAG and option.values]
    return named[-1] if named else TRANSFORMER_ENGINE


def provide_for(megatron: Sequence[str]) -> None:
    """Provide Transformer Engine if a job names it and this machine has no GPU."""
    if names(megatron) == TRANSFORMER_ENGINE and not backend.cuda_is_usable():
        provide()


def provide() -> str | None:
    """Let Megatron find Transformer Engine, with our kernels; call it before Megatron is imported.

    Returns:
        The reason why it cannot be had; None if it is there.
    """
    # One answer for the life of the process: a failed import would fail again.
    if not _state:
        _state.append(_provide())
    return _state[0]


def _provide() -> str | None:
    if installed.REASON is None:  # usable as it is, on a GPU
        return None
    if _MEGATRON in sys.modules:
        return "Megatron was imported without it in this process"
    # Hidden for any other reason than the missing GPU, the package stays hidden.
    if installed.REASON != installed.NO_GPU:
        return installed.REASON
    try:
        found = version("transformer-engine")
    except PackageNotFoundError:
        return (
            f"it is not installed (pip install --no-deps transformer-engine=={bridges.VERSION}; "
            "1.2 MB, no CUDA)"
        )
    if found != bridges.VERSION:
        return f"version {found} is installed; {bridges.VERSION} runs on a CPU"
    # The package comes back, with our modules for its compiled ones.
    installed.forget()
    finder.install()
    # Functions that the package would compile by torch run as they are written.
    os.environ.setdefault("NVTE_TORCH_COMPILE", "0")
    # Delayed scales of fp8 are then updated by the package's own lines, not by a compiled function.
    os.environ.setdefault("NVTE_UNFUSED_FP8_UPDATE", "1")
    try:
        importlib.import_module("transformer_engine.pytorch")
    # Local layers remain, as if the package were not there; a broken one may raise anything.
    except Exception as error:
        finder.remove()
        installed.hide()
        return str(error)
    return None


def is_provided() -> bool:
    """Tell if this process has Transformer Engine's layers on a CPU."""
    return bool(_state) and _state[0] is None


def why_local(megatron: Sequence[str]) -> str | None:
    """Return the reason why a job trains with local layers on a CPU; None if it does not."""
    named = names(megatron)
    if named == TRANSFORMER_ENGINE:
        reason = provide()
        return None if reason is None else f"no Transformer Engine on this CPU: {reason}"
    return "the job names them" if named == LOCAL else f"{named} is for GPUs"


def cpu_flags(megatron: Sequence[str]) -> tuple[str, ...]:
    """Return `backend.CPU_FLAGS` for a job, without the flags of local layers under Transformer
    Engine."""
    if why_local(megatron) is not None:
        return backend.CPU_FLAGS
    return tuple(flag for flag in backend.CPU_FLAGS if flag not in _ONLY_LOCAL)


def gpu_flags(megatron: Sequence[str]) -> tuple[str, ...]:
    """Return the flags with which a job trains on a GPU whatever is installed: those of local
    layers where the job names them or there are no others, and with Transformer Engine's layers the
    flag without which Megatron's own output layer asks for Apex."""
    # On a GPU the compiled part has to be there, or the package has no kernels.
    if names(megatron) == LOCAL or importlib.util.find_spec("transformer_engine_torch") is None:
        return backend.PLAIN_GPU_FLAGS
    # `ColumnParallelLinear` refuses to be built with the flag's default and without this module.
    has_apex = importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    return () if has_apex else (_UNFUSED_GRADIENTS,)


def said(megatron: Sequence[str]) -> str:
    """Say with which layers a job trains on this machine."""
    reason = why_local(megatron)
    if reason is not None:
        return f"Megatron's local ones ({reason})"
    # Nothing stands against the package where it has a GPU and its own kernels.
    if installed.REASON is None:
        return f"Transformer Engine {version('transformer-engine')}'s own"
    return f"Transformer Engine {bridges.VERSION}'s own, its kernels in plain torch"
