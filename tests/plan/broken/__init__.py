"""Plans that break one invariant each, and the words in which they are refused."""

from __future__ import annotations

from tests.plan.broken import placed, structure, trained
from tests.plan.broken.for_cluster import BROKEN_FOR_CLUSTER

__all__ = ["BROKEN", "BROKEN_FOR_CLUSTER"]

BROKEN = structure.BROKEN | placed.BROKEN | trained.BROKEN
