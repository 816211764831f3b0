"""`python -m megatron_hetero VERB`, the same as `megatron-hetero VERB`."""

from __future__ import annotations

import sys

from megatron_hetero.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
