"""`python -m megatron_hetero.pretrain_gpt`: pre-train a GPT on a plan, by `runtime.job.entry`."""

from __future__ import annotations

import sys

from megatron_hetero.errors import HeteroError


def main() -> int:
    """Train under a plan; exit with 5 and what to install where the runtime is missing."""
    try:
        # Before Megatron is imported, because its modules look for Transformer Engine at import.
        from megatron_hetero.runtime.transformer_engine.layers import provide_for

        provide_for(sys.argv[1:])
        from megatron_hetero.runtime.job.entry import main as train
    except ModuleNotFoundError as error:
        print(
            f"error: {error.name} is not installed; training needs it. "
            'Install megatron-hetero with its extra: pip install ".[runtime]" in a clone, or the '
            "wheel of `make dist` with [tested].",
            file=sys.stderr,
        )
        return 5
    try:
        train()
    except HeteroError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
