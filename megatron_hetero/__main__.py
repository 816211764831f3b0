"""`python -m megatron_hetero VERB`, the same as `megatron-hetero VERB`."""

from __future__ import annotations

from megatron_hetero.cli.main import console

if __name__ == "__main__":
    console()
