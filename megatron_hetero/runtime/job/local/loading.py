"""Everything that a rank needs, loaded before the first fork."""

from __future__ import annotations

import logging
import warnings
from functools import cache
from importlib import import_module

_FOR_RANKS = (
    "megatron.core.datasets.helpers",
    "megatron.core.models.mimo.optimizer",
    "megatron.core.tokenizers.text.models",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.training.training",
    "megatron_hetero.runtime.job.attachments",
    "megatron_hetero.runtime.job.entry",
    "megatron_hetero.runtime.model.gpt",
    "megatron_hetero.runtime.state.safety",
    "torch.utils.serialization.config",
)
"""Modules that together import everything for a rank, in part late."""


@cache
def preload() -> None:
    """Load everything that ranks need, before the first fork.

    Warnings of torch and Megatron about missing GPUs, Transformer Engine and Apex are no news on a
    CPU and are hidden.
    """
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in _FOR_RANKS:
            import_module(name)
        from megatron_hetero.runtime.job.agreement import agreed_versions
        from megatron_hetero.runtime.megatron import flag_texts, guards

        # What every rank would check, replace and hash for itself is inherited through the fork.
        guards.check_symbols(is_stock=False)
        flag_texts.apply()
        agreed_versions()
