"""`python -m megatron_hetero.launch pretrain_gpt.py ...`: a plan in a script that is not changed.

    torchrun ... -m megatron_hetero.launch pretrain_gpt.py <Megatron flags> --hetero-plan plan.json

Runs somebody's own pre-training script with `runtime.job.hook` in place of the three functions that
it takes from Megatron; everything else in it (batches, loss, datasets) is the script's.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from megatron_hetero.errors import HeteroError, MegatronVersionError, UsageError
from megatron_hetero.model.megatron_release import FIRST, RELEASE

USAGE = "usage: python -m megatron_hetero.launch SCRIPT.py [the script's own arguments]"

# Where a script takes the three functions from.
_SOURCES = (
    ("megatron.training.arguments", "parse_and_validate_args"),
    ("megatron.training.argument_utils", "gpt_config_from_args"),
    ("megatron.training", "pretrain"),
)


def main() -> int:
    """Run the script that the command line names; return the exit code."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(USAGE)
        print(__doc__)
        return 0 if len(sys.argv) > 1 else 2
    try:
        run_script(Path(sys.argv[1]), sys.argv[2:])
    except HeteroError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


def run_script(script: Path, argv: list[str]) -> None:
    """Run `script` as the main program, with the plan of `argv` hooked into it.

    Raises:
        UsageError: there is no such script; or it ended without a call of Megatron's `pretrain`,
            so that the plan was not used.
        MegatronVersionError: its Megatron lacks one of the functions.
    """
    if not script.is_file():
        raise UsageError(f"{script}: there is no such script. {USAGE}")
    # The script and Megatron see the command line as if the script had been started itself.
    sys.argv = [str(script), *argv]
    # As Python does for a script: a Megatron-LM tree around it comes before an installed wheel.
    sys.path.insert(0, str(script.resolve().parent))
    try:
        # Transformer Engine's place is filled before Megatron looks for it.
        from megatron_hetero.runtime.transformer_engine.layers import provide_for

        provide_for(argv)
        from megatron_hetero.runtime.job.hook import hooked
    except ModuleNotFoundError as error:
        raise MegatronVersionError(
            f"{error.name} is not installed; training needs it. Install megatron-hetero with its "
            'extra: pip install ".[runtime]" in a clone, or the wheel of `make dist` with [tested].'
        ) from error
    # The three functions as Megatron has them, and as a plan needs them.
    originals = [_function(module, name) for module, name in _SOURCES]
    parse, configure, pretrain = hooked(*originals)
    # Notes that `pretrain` was called: without a call the plan has had no effect.
    called = []

    def pretrain_noted(*given: Any, **named: Any) -> Any:
        called.append(True)
        return pretrain(*given, **named)

    # Replaced where scripts take them from, before the script runs its own imports.
    for (module, name), step in zip(_SOURCES, (parse, configure, pretrain_noted), strict=True):
        setattr(sys.modules[module], name, step)
    runpy.run_path(str(script), run_name="__main__")
    if not called:
        raise UsageError(
            f"{script} ended without a call of megatron.training.pretrain, so that no plan was "
            "used. Name a pre-training script such as Megatron-LM's pretrain_gpt.py."
        )


def _function(module: str, name: str) -> Any:
    from importlib import import_module

    function = getattr(import_module(module), name, None)
    if function is None:
        raise MegatronVersionError(
            f"{module}.{name} is not there: this Megatron is older than core {RELEASE}. Use "
            f"a Megatron-LM tree of core_v{FIRST} or later, or the wheel megatron-core {RELEASE}."
        )
    return function


if __name__ == "__main__":
    sys.exit(main())
