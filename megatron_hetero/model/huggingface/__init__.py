"""`config.json` of Hugging Face models as Megatron flags.

translate  from the file to flags
config     keys, by family of models
latent     models with latent attention
words      flags that several families share
"""

from __future__ import annotations

from megatron_hetero.model.huggingface.translate import (
    SUPPORTED_MODEL_TYPES,
    megatron_words_from_huggingface,
)

__all__ = ["SUPPORTED_MODEL_TYPES", "megatron_words_from_huggingface"]
