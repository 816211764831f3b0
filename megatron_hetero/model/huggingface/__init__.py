"""`config.json` of Hugging Face models as Megatron flags.

translate  from the file to flags; the keys that nobody knows
config     keys, those that change nothing, defaults
families   decoders like Llama, and the ways in which they are not
decoder    flags of these
latent     models with latent attention
older      GPT-NeoX, OPT, GPT-2
experts    how many experts, where, and how they are chosen
positions  rotary positions and their scaling
writer     flags with the line of the key behind each
weight_families  the families whose weights convert too (`lab.huggingface`)
"""

from __future__ import annotations

from megatron_hetero.model.huggingface.translate import (
    SUPPORTED_MODEL_TYPES,
    megatron_words_from_huggingface,
    with_class_defaults,
)

__all__ = ["SUPPORTED_MODEL_TYPES", "megatron_words_from_huggingface", "with_class_defaults"]
