"""`python -m megatron_hetero.pretrain_gpt`: pre-train a GPT on a plan, by `runtime.entry`."""

from __future__ import annotations

import sys

from megatron_hetero.errors import HeteroError


def main() -> int:
    try:
        from megatron_hetero.runtime.entry import main as train
    except ModuleNotFoundError as error:
        print(
            f"error: {error.name} is not installed; training needs it. "
            'Install "megatron-hetero[runtime]".',
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
