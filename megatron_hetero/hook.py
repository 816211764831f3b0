"""The name by which a patched training script takes the hook; it stays where rooms are moved."""

from __future__ import annotations

from megatron_hetero.runtime.job.hook import hooked

__all__ = ["hooked"]
