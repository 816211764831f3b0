"""The import hook: our modules for compiled ones, and modules that are read with other words.

Only names of `_MADE` and `bridges` are touched; all other imports go on as before.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Mapping, Sequence

from megatron_hetero.runtime.transformer_engine import compiled
from megatron_hetero.runtime.transformer_engine.bridges import bridged, bridged_modules

_MADE: Mapping[str, Callable[[str], types.ModuleType]] = {
    "transformer_engine_torch": compiled.compiled_module,
    "fused_weight_gradient_mlp_cuda": compiled.apex_module,
    "transformer_engine.pytorch.onnx_extensions": compiled.onnx_module,
}
"""Name -> what makes the module."""


class _StandInLoader(importlib.abc.Loader):
    """Loader of a module that is made, not read."""

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _MADE[spec.name](spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module as it was made."""


class _Bridged(importlib.machinery.SourceFileLoader):
    """Loader of a module's own source with words exchanged; nothing is cached on disk."""

    def get_code(self, fullname: str) -> types.CodeType:
        path = self.get_filename(fullname)
        source = bridged(fullname, self.get_data(path).decode())
        # The module's own future imports count, not this file's.
        return compile(source, path, "exec", dont_inherit=True)


class CpuFinder(importlib.abc.MetaPathFinder):
    """Finder of the modules that a CPU needs otherwise."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in _MADE:
            # These modules come from no file.
            return importlib.machinery.ModuleSpec(
                fullname, _StandInLoader(), origin=compiled.__file__
            )
        if fullname not in bridged_modules():
            return None
        # Python's own finder knows where the module's source is.
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Bridged(fullname, spec.origin)
        return spec


def install() -> None:
    """Put the hook in front of all others in this process; a second call changes nothing."""
    if not any(isinstance(finder, CpuFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, CpuFinder())


def remove() -> None:
    """Take the hook away, and forget the modules made by the hook."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, CpuFinder)]
    # Modules read through the hook have words exchanged: nobody may find them later.
    for name in list(sys.modules):
        if name in _MADE or name.partition(".")[0] == "transformer_engine":
            del sys.modules[name]
