"""Limits of work for proving the lower bound."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class ProofEffort:
    """How far a bound is proved."""

    max_work: int
    """Numbers looked at; after that nothing more is proved."""
    max_gpus: float
    """Clusters of more GPUs get the next smaller effort; of the least, the bound by work alone."""
    is_deep: bool = False
    """True if many micro-batches in flight are told apart in large clusters too."""


QUICK = ProofEffort(1_000_000_000, 128)
"""For many questions: about a second each."""
THOROUGH = ProofEffort(2_000_000_000, 64)
"""For a plan's own bound: several seconds."""
PROOF = ProofEffort(20_000_000_000, inf, is_deep=True)
"""For a requested proof (`plan --prove`): a minute at most, ten seconds on 1,000 GPUs."""
