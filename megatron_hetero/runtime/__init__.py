"""Everything that touches torch and Megatron."""

from megatron_hetero.runtime.model.transformer_engine import hide_if_broken

# Before any module of this package imports Megatron, which imports Transformer Engine.
NO_TRANSFORMER_ENGINE = hide_if_broken()
"""Why Megatron's own layers are used; None where Transformer Engine is usable."""
