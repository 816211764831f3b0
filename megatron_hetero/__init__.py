"""Plan and run NVIDIA Megatron training on GPUs that do not match.

The folders of this package are read in the order in which the data travels; `CONTRIBUTING.md` has
the tour.  Importing the package loads nothing else: planning never needs torch.
"""

from __future__ import annotations

__version__ = "0.1.0"
