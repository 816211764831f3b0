"""Functions of tests in a process of their own, with Transformer Engine's layers or without.

    python -m tests.runtime.transformer_engine.with_layers LAYERS MODULE FUNCTION JSON

Megatron looks for Transformer Engine once, when it is imported, so one process has one of the two.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

TRANSFORMER_ENGINE, LOCAL = "transformer_engine", "local"
_TIMEOUT_S = 600
_ROOT = Path(__file__).parents[3]


def call(layers: str, function: Any, *arguments: Any) -> Any:
    """Call a function of a module with JSON-like arguments in a new process; return its result.

    Args:
        layers: TRANSFORMER_ENGINE or LOCAL, which the process has.
        function: a function of a module, not one that is made inside of another.
        arguments: data that JSON can say.
    """
    names = (function.__module__, function.__name__)
    done = subprocess.run(
        [sys.executable, "-m", __name__, layers, *names, json.dumps(arguments)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"},
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(layers: str, module: str, function: str, arguments: Sequence[Any]) -> None:
    """Be that process."""
    from megatron_hetero.runtime.transformer_engine import layers as of_process

    if layers == TRANSFORMER_ENGINE:
        reason = of_process.provide()
        if reason is not None:
            sys.exit(f"no Transformer Engine on this CPU: {reason}")
    result = getattr(import_module(module), function)(*arguments)
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:4], json.loads(sys.argv[4]))
